"""Opens a client connection. Also the protocol object that carries it.

A connection counts as open when the server's SETTINGS have arrived. A port that accepts and stays silent, or speaks
another protocol, is a failure to connect, so the calls that waited for it were certainly not sent.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl as ssl_module
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar, cast

from raftkv.loop.cycle_free import forget_frames, release
from raftkv.rpc.client.core import ClientCore
from raftkv.rpc.limits import ChannelOptions
from raftkv.rpc.protocol import KEEPALIVE_PING, H2Protocol, Keepalive
from raftkv.rpc.status import Code
from raftkv.rpc.tls import EncryptedTransport, RefusedPeerError, Security, reason_of

if TYPE_CHECKING:
    from raftkv.rpc.client.channel import Channel

# -- lookup ---------------------------------------------------------------------------------------------------------
#
# Lookups of host names on daemon threads, so that a program can end while a dead DNS server does not answer.
#
#     for address in await addresses("h1.example", 2379): ...
#
# asyncio looks names up on a thread pool that both the end of the loop and the end of the interpreter join, and a
# running lookup cannot be cancelled: with a dead server it takes ten seconds and more, even if its caller had a shorter
# time limit. Here an abandoned thread ends by itself, or with the process. Concurrent lookups of one name share a
# thread, so repeated connection attempts while DNS is dead do not pile up threads.

T = TypeVar("T")

_under_way: Final[dict[tuple[str, int], Future[list[str]]]] = {}
_lock = threading.RLock()


async def addresses(host: str, port: int) -> list[str]:
    """Return the numeric addresses of a host, link-local ones with ``%interface``, in the order in which to try them.

    Arguments:
        host: name or address.
        port: port, since a name may resolve differently for another port.

    Raises:
        OSError: the host has no address, or no DNS server answers.
    """
    if _is_number(host):
        return [host]
    key = host, port
    with _lock:
        found = _under_way.get(key)
        if found is None:
            found = _under_way[key] = _begin(lambda: _look_up(host, port))
            found.add_done_callback(lambda _: _forget(key))
    return await _answer(found)


async def beside(work: Callable[[], T]) -> T:
    """Run blocking work that may hang, such as a DNS lookup, on its own daemon thread, and return its result.

    Raises:
        OSError: no thread could be started.
    """
    return await _answer(_begin(work))


def _begin(work: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()

    def do() -> None:
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    try:
        threading.Thread(target=do, name="raftkv-lookup", daemon=True).start()
    except RuntimeError as error:  # the process may start no more threads now
        raise OSError(errno.EAGAIN, str(error)) from None
    return future


async def _answer(future: Future[T]) -> T:
    """Wait for a thread. Cancelling one caller leaves the answer to the others."""
    loop = asyncio.get_running_loop()
    told = asyncio.Event()

    def tell(_: Future[T]) -> None:
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(told.set)

    future.add_done_callback(tell)
    await told.wait()
    return future.result()


def _look_up(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    # The interface of a link-local IPv6 address is the fourth part of it: nothing leads there without.
    zones = (f"%{address[3]}" if len(address) > 3 and address[3] else "" for *_, address in found)
    return list(dict.fromkeys(f"{address[0]}{zone}" for (*_, address), zone in zip(found, zones, strict=True)))


def _is_number(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError):
            socket.inet_pton(family, host)
            return True
    return False


def _forget(key: tuple[str, int]) -> None:
    with _lock:
        _under_way.pop(key, None)


def _after_fork() -> None:
    """Forget the lookups of the parent process: their threads do not exist in the child."""
    global _lock
    _lock = threading.RLock()
    _under_way.clear()


os.register_at_fork(after_in_child=_after_fork)


HEAD_START_S = 0.25
_BLOCKED_INPUT_BYTES = 2**31
_WRITE_STALL_TIMEOUT_S = 60.0
_CLOSE_TIMEOUT_S = 1.0


class ConnectError(Exception):
    """Connecting to a target failed; the text says which target, and why.

    Attributes:
        is_refusal: whether the target's machine reports that nothing listens there.
    """

    def __init__(self, text: str, *, is_refusal: bool = False) -> None:
        super().__init__(text)
        self.is_refusal = is_refusal


def split_target(target: str) -> tuple[str, int]:
    """Return host and port of ``host:port`` or ``[v6]:port``. Raises ValueError if the target is neither."""
    host, colon, port = target.rpartition(":")
    if not colon or not port.isdigit():
        raise ValueError(f"not host:port: {target!r}")
    return host.strip("[]"), int(port)


class ClientH2Protocol(H2Protocol[ClientCore]):
    """A client's HTTP/2 connection; tells its owner when the transport is lost."""

    def __init__(self, connection: ClientConnection, transport: asyncio.Transport, options: ChannelOptions) -> None:
        super().__init__(
            connection.core,
            transport,
            asyncio.get_running_loop(),
            buffer_bytes=options.transport_buffer_bytes,
            blocked_input_bytes=_BLOCKED_INPUT_BYTES,
            write_stall_timeout_s=_WRITE_STALL_TIMEOUT_S,
        )
        self._connection = connection

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail every call of the connection: the transport is gone."""
        if isinstance(exc, ssl_module.SSLError):
            self._connection.end_reason = reason_of(exc)
        self._connection.transport_lost()
        super().connection_lost(exc)
        self._connection.finished()


class ClientConnection(asyncio.Protocol):
    """One connection of a channel: transport, core, keepalive. It is the protocol itself until the transport is up.

    Attributes:
        gone: set once the connection takes no more calls.
        lost: set once its transport is gone.
        settled: set once the server's SETTINGS have arrived, or can no longer arrive.
        below_tls: transport of the socket, under TLS.
        end_reason: why TLS ended, if the peer has said so.
        forget: called when the connection has ended; or None.
    """

    def __init__(self, channel: Channel) -> None:
        self._loop = asyncio.get_running_loop()
        self.core = ClientCore(channel.options, self, self._loop.time)
        self.gone = asyncio.Event()
        self.lost = asyncio.Event()
        self.settled = asyncio.Event()
        self._channel = channel
        self._protocol: ClientH2Protocol | None = None
        self._keepalive: Keepalive | None = None
        self._transport: asyncio.Transport | None = None
        self.below_tls: asyncio.Transport | None = None
        self.end_reason = ""
        self.forget: Callable[[], None] | None = None

    # ---- transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the preface: the transport is up."""
        self._transport = cast(asyncio.Transport, transport)
        ssl_object = transport.get_extra_info("ssl_object")
        if ssl_object is not None and ssl_object.selected_alpn_protocol() not in ("h2", None):
            self._transport.abort()
            return
        self._protocol = ClientH2Protocol(self, self._transport, self._channel.options)
        self._transport.set_protocol(self._protocol)
        self._channel.opened(self)
        self._protocol.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """End: the transport was lost before it was in use."""
        self.transport_lost()
        self.finished()

    def transport_lost(self) -> None:
        """Start no more calls here."""
        if self._keepalive is not None:
            self._keepalive.close()
        self._channel.retired(self)

    def finished(self) -> None:
        """Release everything: the connection has ended."""
        self.gone.set()
        self.settled.set()
        self.lost.set()
        self._channel.closed(self)
        if self.forget is not None:
            self.forget()
            self.forget = None
        self.core.released()
        release(self._transport)
        release(self.below_tls)
        self.below_tls = self._transport = self._protocol = self._keepalive = None

    # ---- called by the core

    def wake(self) -> None:
        """Flush at the start of the loop's next turn."""
        self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send the core's output."""
        if self._protocol is not None:
            self._protocol.flush()

    def ready(self) -> None:
        """Note that the server's SETTINGS have arrived, and start the keepalive."""
        time_s = self._channel.keepalive_time_s
        if time_s is not None and self._protocol is not None and self._transport is not None:
            protocol = self._protocol
            self._keepalive = Keepalive(
                self._loop,
                time_s,
                self._channel.options.keepalive_timeout_s,
                last_read_s=lambda: protocol.last_read_s,
                active=lambda: bool(self.core.calls) or self._channel.options.keepalive_without_calls,
                ping=partial(self.core.ping, KEEPALIVE_PING),
                dead=self._transport.abort,
            )
        self.settled.set()

    def draining(self, too_many_pings: bool) -> None:
        """Retire: the server wants no more calls on this connection."""
        if too_many_pings:
            self._channel.slow_down_pings()
        self._channel.retired(self)
        self.gone.set()

    def room(self) -> None:
        """Start waiting calls: a stream may be free."""
        self._channel.start_queued()

    # ---- the end

    def close(self, reason: str) -> None:
        """Fail the open calls, and close the transport."""
        self.core.close()
        self.core.fail_all(Code.CANCELLED, reason)
        self.flush()
        if self._transport is None:
            return
        if self._transport.get_write_buffer_size() == 0:
            self._transport.abort()
        else:
            # A peer that does not read must not keep us from closing.
            self._loop.call_later(_CLOSE_TIMEOUT_S, self._transport.abort)

    def abort(self) -> None:
        """Abort the connection, or the attempt to open it."""
        if self._transport is not None:
            self._transport.abort()
        else:
            self.core.released()


async def connect(target: str, ssl: Security | None, channel: Channel) -> ClientConnection:
    """Return a connection that is ready for calls.

    Arguments:
        target: ``host:port``, or ``unix:`` and a path.
        ssl: TLS policy; None: plain text.
        channel: owner of the connection.

    Raises:
        ConnectError: there is no connection within the channel's time limits, for any reason.
    """
    try:
        return await _connect(target, ssl, channel)
    except ConnectError:
        channel.failed_connects += 1  # the next attempt begins with another address of the name: this host may hang
        raise


async def _connect(target: str, ssl: Security | None, channel: Channel) -> ClientConnection:
    options = channel.options
    connection = ClientConnection(channel)
    try:
        async with asyncio.timeout(options.connect_timeout_s):
            transport, host = await _open(target, ssl, channel, connection)
        async with asyncio.timeout(options.settings_timeout_s):
            if ssl is not None:
                await _start_tls(transport, ssl, target, options.authority or host, connection)
            await connection.settled.wait()
    except TimeoutError:
        connection.abort()
        raise ConnectError(f'desc = "transport: timed out connecting to {target}"') from None
    except (OSError, ValueError, RefusedPeerError) as error:  # ssl.SSLError is an OSError
        connection.abort()
        forget_frames(error)
        if ssl is not None and isinstance(error, (ssl_module.SSLError, RefusedPeerError)):
            ssl.failed(target, reason_of(error))
        text = f'desc = "transport: Error while dialing: dial tcp {target}: {_reason(error)}"'
        raise ConnectError(text, is_refusal=isinstance(error, ConnectionRefusedError)) from None
    except asyncio.CancelledError:
        connection.abort()
        raise
    if not connection.core.accepting:
        connection.abort()
        why = f": {connection.end_reason}" if connection.end_reason else ""
        if ssl is not None and connection.end_reason:
            ssl.failed(target, connection.end_reason)
        closed = "closed the connection" if ssl is None or why else "closed the connection under TLS"
        raise ConnectError(f'desc = "transport: {target} {closed} before its HTTP/2 settings came{why}"')
    return connection


async def _open(
    target: str, ssl: Security | None, channel: Channel, connection: ClientConnection
) -> tuple[asyncio.Transport, str]:
    """Connect to a target, before TLS. Returns the transport and the host name of the target."""
    loop = asyncio.get_running_loop()
    if target.startswith("unix:"):
        host = "localhost"
        transport, _ = await loop.create_unix_connection(lambda: _opening(ssl, connection), target[5:])
    else:
        host, port = split_target(target)
        found = await addresses(host, port)
        first = channel.failed_connects % len(found)
        taken = await _connected([*found[first:], *found[:first]], port)
        try:
            transport, _ = await loop.create_connection(lambda: _opening(ssl, connection), sock=taken)
        except BaseException:
            taken.close()
            raise
    return transport, host


async def _connected(found: Sequence[str], port: int) -> socket.socket:
    """Return a socket to the first address that connects; each has a head start on the next (RFC 8305, section 5)."""
    waiting, errors = list(found), list[BaseException]()
    attempts: set[asyncio.Task[socket.socket]] = set()
    won: socket.socket | None = None
    try:
        while waiting or attempts:
            if waiting:
                attempts.add(asyncio.ensure_future(_connected_to(waiting.pop(0), port)))
            timeout_s = HEAD_START_S if waiting else None
            done, _ = await asyncio.wait(attempts, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            for attempt in done:
                attempts.discard(attempt)
                error = attempt.exception()
                if error is None:
                    won = attempt.result()
                    return won
                if not isinstance(error, OSError):
                    raise error
                errors.append(error)
    finally:
        await _give_up(attempts, won)
    if all(isinstance(error, ConnectionRefusedError) for error in errors):
        raise errors[0]
    raise OSError("; ".join(dict.fromkeys(map(reason_of, errors))))


async def _connected_to(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # asyncio sets TCP_NODELAY only if the protocol is named: without it a member's messages wait for each other.
    opened = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        opened.setblocking(False)
        host, _, zone = address.partition("%")
        place = (host, port, 0, int(zone)) if zone else (host, port)
        await asyncio.get_running_loop().sock_connect(opened, place)
    except BaseException:
        opened.close()
        raise
    return opened


async def _give_up(attempts: set[asyncio.Task[socket.socket]], won: socket.socket | None) -> None:
    """Cancel the other attempts, and close their sockets."""
    for attempt in attempts:
        attempt.cancel()
    try:
        if attempts:
            await asyncio.wait(attempts)
    except BaseException:
        if won is not None:
            won.close()
        raise
    for attempt in attempts:
        if not attempt.cancelled() and attempt.exception() is None:
            attempt.result().close()  # it came second, or the caller was cancelled


def _opening(ssl: Security | None, connection: ClientConnection) -> asyncio.BaseProtocol:
    return connection if ssl is None else asyncio.Protocol()


async def _start_tls(
    transport: asyncio.Transport, ssl: Security, target: str, name: str, connection: ClientConnection
) -> None:
    """Complete the handshake, and check the peer."""
    connection.below_tls = transport
    tls = EncryptedTransport(transport, ssl.context(), server_side=False, server_hostname=name)
    try:
        await tls.handshake()
        await ssl.admit(tls.get_extra_info("ssl_object"), target)
    except ssl_module.SSLError:
        release(transport)  # it closes once the alert has left
        raise
    except BaseException:
        transport.abort()
        release(transport)
        raise
    connection.connection_made(tls)
    if not tls.is_closing():
        connection.forget = ssl.opened(tls.get_extra_info("ssl_object"), target, connection.abort)
    tls.resume_reading()


def _reason(error: BaseException) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connect: connection refused"
    return reason_of(error)
