"""A connection from accept on: TLS handshake, which protocol it speaks, and then the right protocol object.

The first bytes decide: HTTP/2's preface or anything else (HTTP/1.1). Under TLS the ALPN choice decides, and a client
without ALPN is sniffed like a plain one. Both steps are timed: a silent connection is closed. Where plain text is
spoken beside TLS, the first byte decides between them: it is 22 in every handshake.

A step of a handshake costs up to some milliseconds of the processor, and an unfinished one costs memory. So a handshake
begins when its first bytes have come, its steps are done ``STEPS_A_TURN`` at a time, by address in turn, and beyond
``unfinished_handshakes`` the oldest of the address with most of them ends: honest ones take milliseconds
(``Handshakes``).

At the limit of connections, those that were idle for ``ServerLimits.crowded_idle_s`` are closed, the longest idle first
(``ConnectionLimit``): an honest client that is idle opens another when it needs one, and a client that only holds
connections loses them. A connection that can be closed at once gives its place to the new one. One that speaks HTTP/2
is closed gracefully, and the new one is refused with a GOAWAY: clients then try again a little later. When none is
idle, the address with most connections loses its newest, if it has more than the newcomer's would have.
"""

from __future__ import annotations

import asyncio
import logging
import ssl as ssl_module
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, cast

from raftkv.loop.cycle_free import forget_frames, release
from raftkv.loop.limiter import Limiter
from raftkv.rpc.http2 import PREFACE, ErrorCode, goaway_frame
from raftkv.rpc.http2.frames import settings_frame
from raftkv.rpc.limits import ServerLimits
from raftkv.rpc.server.calls import Peer
from raftkv.rpc.server.core import ServerCore, ServerH2Protocol
from raftkv.rpc.server.http1 import Http1Protocol
from raftkv.rpc.shares import Identify, Identity, Shares, identity_of_peer, queue_of
from raftkv.rpc.tls import EncryptedTransport, RefusedPeerError, Security, reason_of

if TYPE_CHECKING:
    from raftkv.rpc.server.server import Server

_log = logging.getLogger(__name__)

_SNIFF_BYTES = 4
_TLS_HANDSHAKE: Final = 22

TOO_MANY = settings_frame({}) + goaway_frame(ErrorCode.ENHANCE_YOUR_CALM, b"too_many_connections", last_stream_id=0)
"""Sent on a connection above the limit: no call of it was served."""


class Connection(asyncio.Protocol):
    """One accepted connection; hands its transport to the protocol it turns out to speak.

    Arguments:
        server: serves it.
        security: of TLS; None: plain text.
        plain_too: whether plain text is taken beside TLS.
        grpc_only: whether plain HTTP is refused.
    """

    def __init__(
        self, server: Server, security: Security | None, *, plain_too: bool = False, grpc_only: bool = False
    ) -> None:
        self._plain_too = plain_too
        self._grpc_only = grpc_only
        self._server = server
        self._security = security
        self._transport: asyncio.Transport | None = None
        self._below_tls: asyncio.Transport | None = None
        self._buffer = b""
        self._timer: asyncio.TimerHandle | None = None
        self._since_s = 0.0
        self.queue: Identity = ""
        """Return the queue of its address: its handshake waits there, and its connections are counted there."""
        self._h2: ServerH2Protocol | None = None
        self._http1: Http1Protocol | None = None
        self._handshake: asyncio.Task[None] | None = None
        self._cause: Exception | None = None
        self._forget: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        self._transport = cast(asyncio.Transport, transport)
        self._since_s = asyncio.get_running_loop().time()
        self.queue = queue_of(identity_of_peer(_address_of(self._transport)))
        if not self._server.add(self):
            self._refuse(self._transport)
        elif self._security is not None:
            self._below_tls = self._transport
            self._server.handshakes.add(self)
            timeout_s = self._server.limits.tls_handshake_timeout_s
            self._timer = asyncio.get_running_loop().call_later(timeout_s, self.give_up, TimeoutError())
        else:
            self._sniff()

    def _refuse(self, transport: asyncio.Transport) -> None:
        """Say that there are too many, as far as that can be said before anything else, and close at once."""
        if self._security is None:
            transport.write(TOO_MANY)
        transport.close()

    # ---- the handshake

    @property
    def _awaits_hello(self) -> bool:
        return self._below_tls is not None and self._below_tls is self._transport and self._handshake is None

    def _begin_handshake(self) -> None:
        """Begin to shake hands: it is this connection's turn, and its first bytes are here."""
        if self._awaits_hello and self._security is not None and self._transport is not None:
            self._handshake = self._server.spawn(self._start_tls(self._transport, self._security))
            self._handshake.add_done_callback(self._handshake_over)

    def _handshake_over(self, task: asyncio.Task[None]) -> None:
        """End a connection whose task was cancelled before its first step: it never comes to do that itself."""
        below = self._below_tls
        if task.cancelled() and below is not None:
            self._fail(below, self._cause or ConnectionAbortedError("the server is stopping"))

    def give_up(self, error: Exception) -> None:
        """End the handshake at any stage.

        Arguments:
            error: why.
        """
        if self._handshake is not None:
            self._cause = error
            self._handshake.cancel()
        elif self._below_tls is not None:
            self._fail(self._below_tls, error)

    def _fail(self, transport: asyncio.Transport, error: BaseException) -> None:
        if self._security is not None:
            self._security.failed(_address_of(transport), reason_of(error))
        # A handshake that OpenSSL ended has an alert to send; any other connection is cut off.
        if not isinstance(error, ssl_module.SSLError):
            transport.abort()
        self.released()

    async def _start_tls(self, transport: asyncio.Transport, security: Security) -> None:
        hello, self._buffer = self._buffer, b""
        tls = EncryptedTransport(transport, security.context(), server_side=True, take_turn=self._take_turn)
        try:
            await tls.handshake(hello)
            tls.set_protocol(self)
            self._transport = tls
            await security.admit(tls.get_extra_info("ssl_object"), _address_of(transport))
        except (OSError, RefusedPeerError) as error:  # ssl.SSLError is an OSError
            forget_frames(error)
            self._fail(transport, error)
            return
        except asyncio.CancelledError:
            if self._cause is None:
                transport.abort()
                self.released()
                raise
            self._fail(transport, self._cause)
            return
        if not self._server.handshakes.done(self):
            return  # lost meanwhile
        self._forget = security.opened(tls.get_extra_info("ssl_object"), _address_of(transport), self.abort)
        self._stop_timer()
        self._since_s = asyncio.get_running_loop().time()
        self._choose_by_alpn(tls)
        tls.resume_reading()

    def _take_turn(self, step: Callable[[], None]) -> None:
        self._server.handshakes.take_turn(step, self.queue)

    def _choose_by_alpn(self, tls: asyncio.Transport) -> None:
        protocol = tls.get_extra_info("ssl_object").selected_alpn_protocol()
        if protocol == "h2":
            self._become_h2(tls)
        elif protocol == "http/1.1":
            self._become_http1(tls)
        else:
            self._sniff()

    def _sniff(self) -> None:
        timeout_s = self._server.limits.preface_timeout_s
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self.abort)
        self._decide()

    def data_received(self, data: bytes) -> None:
        """Keep the first bytes; under TLS they may come before we know that the handshake is over."""
        self._buffer += data
        if self._awaits_hello and self._plain_too and self._buffer[0] != _TLS_HANDSHAKE:
            self._server.handshakes.done(self)
            self._stop_timer()
            self._security = self._below_tls = None
            self._sniff()
        elif self._awaits_hello and self._transport is not None:
            self._transport.pause_reading()
            self._server.handshakes.take_turn(self._begin_handshake, self.queue)
        else:
            self._decide()

    def _decide(self) -> None:
        if len(self._buffer) < _SNIFF_BYTES or self._transport is None or self._timer is None:
            return
        if self._buffer[:_SNIFF_BYTES] == PREFACE[:_SNIFF_BYTES]:
            self._become_h2(self._transport)
        else:
            self._become_http1(self._transport)

    def _become_h2(self, transport: asyncio.Transport) -> None:
        server = self._server
        router = server.grpc_router if self._grpc_only else server.router
        core = ServerCore(router, server.limits, server.environment(), _peer_of(transport, server.identify))
        self._h2 = ServerH2Protocol(core, transport, server.cork, self.released, server.backlog())
        buffered = self._hand_over(transport, self._h2)
        if buffered:
            self._h2.feed(buffered)
        core.wake()  # our SETTINGS

    def _become_http1(self, transport: asyncio.Transport) -> None:
        if self._grpc_only:
            self.abort()
            return
        server = self._server
        self._http1 = Http1Protocol(
            server, transport, _peer_of(transport, server.identify), self.released, self._since_s
        )
        buffered = self._hand_over(transport, self._http1)
        if buffered:
            self._http1.data_received(buffered)

    def _hand_over(self, transport: asyncio.Transport, protocol: asyncio.BaseProtocol) -> bytes:
        self._stop_timer()
        transport.set_protocol(protocol)
        buffered, self._buffer = self._buffer, b""
        return buffered

    @property
    def peer(self) -> Peer | None:
        """The peer, as its calls have it; None: it speaks no HTTP/2 (yet)."""
        return self._h2.core.peer if self._h2 is not None else None

    @property
    def open_calls(self) -> int:
        """gRPC calls under way."""
        return self._h2.core.open_calls if self._h2 is not None else 0

    @property
    def idle_since_s(self) -> float | None:
        """Loop time since when nothing is done for the client; None: something is, it is going, or shakes hands."""
        if self._h2 is not None:
            return None if self._h2.core.open_calls or self._h2.draining else self._h2.last_read_s
        if self._http1 is not None:
            return self._http1.idle_since_s
        return self._since_s if self._below_tls is None or self._below_tls is not self._transport else None

    def make_way(self) -> bool:
        """Go, for a connection that is one too many; whether the place is free now."""
        if self._h2 is not None and self._server.limits.goaway_notice_timeout_s > 0:
            self.drain()  # or a call that is on its way would be lost
            return False
        self.end()
        return True

    def end(self) -> None:
        """Go at once, with the calls under way: another address has a right to this place."""
        self.abort()
        self._server.discard(self)

    @property
    def held_bytes(self) -> int:
        """Bytes of unfinished messages."""
        return self._h2.core.held_bytes if self._h2 is not None else 0

    @property
    def reading(self) -> bool:
        """False while the client is not read, because it does not read us."""
        return self._transport is not None and self._transport.is_reading()

    def drain(self) -> None:
        """Close gracefully, as far as the protocol knows how."""
        if self._h2 is not None:
            self._h2.drain()
        elif self._http1 is not None:
            self._http1.drain()
        else:
            self.abort()

    def abort(self) -> None:
        """Cut the connection."""
        if self._h2 is not None:
            self._h2.abort()
        elif self._transport is not None:
            self._transport.abort()

    def eof_received(self) -> bool | None:
        """The client has gone before it said anything."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone before its protocol was known, or was refused."""
        self.released()

    def released(self) -> None:
        """The protocol of this connection has ended."""
        self._stop_timer()
        self._server.handshakes.done(self)
        self._server.discard(self)
        if self._forget is not None:
            self._forget()
            self._forget = None
        release(self._transport)
        release(self._below_tls)
        self._transport = self._below_tls = self._h2 = self._http1 = self._handshake = None

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _address_of(transport: asyncio.Transport) -> str:
    name = transport.get_extra_info("peername")
    if not isinstance(name, tuple):
        return "unix:"
    return f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"


def _peer_of(transport: asyncio.Transport, identify: Identify) -> Peer:
    address = _address_of(transport)
    loopback = _is_loopback(transport.get_extra_info("sockname"))
    ssl_object = transport.get_extra_info("ssl_object")
    if ssl_object is None:
        return Peer(address, loopback=loopback, identity=identify(address, None))
    # Only a certificate of a trusted authority identifies the peer.
    is_verified = ssl_object.context.verify_mode == ssl_module.CERT_REQUIRED
    certificate = (ssl_object.getpeercert() or None) if is_verified else None
    return Peer(address, certificate, True, loopback, identity=identify(address, certificate))


def _is_loopback(name: object) -> bool:
    if not isinstance(name, tuple):
        return False
    host = str(name[0]).removeprefix("::ffff:")
    return host == "::1" or host.startswith("127.")


STEPS_A_TURN: Final = 8
"""A signature with an RSA key of 4096 bits takes 4 ms, all else far less."""


class Handshakes:
    """The unfinished handshakes of one server.

    Arguments:
        unfinished_max: connections that may be between accept and the end of their handshake.
    """

    def __init__(self, unfinished_max: int) -> None:
        self._unfinished: dict[Connection, None] = {}
        self._shares = Shares(unfinished_max)
        self._steps = Limiter(STEPS_A_TURN)

    def __len__(self) -> int:
        return len(self._unfinished)

    def add(self, handshake: Connection) -> None:
        """Count a new connection; if there are too many, the oldest of the greediest address goes."""
        queue = handshake.queue
        if not self._shares.make_room(queue, 1, self._give_way):
            self._give_way(queue)
        self._unfinished[handshake] = None
        self._shares.take(queue, 1)

    def _give_way(self, queue: Identity) -> bool:
        oldest = next((one for one in self._unfinished if one.queue == queue), None)
        if oldest is None:
            return False
        self.done(oldest)
        text = f"more than {self._shares.limit} handshakes are unfinished, and this is the oldest"
        oldest.give_up(RefusedPeerError(text))
        return True

    def take_turn(self, step: Callable[[], None], queue: Identity = "") -> None:
        """Do a step of a handshake when it is its turn.

        Arguments:
            step: does nothing if its handshake is over by then.
            queue: of the client.
        """
        self._steps.add(step, queue)

    def done(self, handshake: Connection) -> bool:
        """Forget it: it is finished, or has failed; False if it was forgotten already."""
        if self._unfinished.pop(handshake, self) is not None:
            return False
        self._shares.give_back(handshake.queue, 1)
        return True


LOG_INTERVAL_S: Final = 10.0
LOOK_S_PER_CONNECTION: Final = 1e-5
"""Rest between two looks at all connections, for each of them. A look takes 1 us for each, so all looks together take a
tenth of the time at most.
"""
LET_GO_MAX: Final = 32
"""Connections that one look asks to go at most, and never more than one of a hundred: each makes room for one only."""


class ConnectionLimit:
    """Makes room for connections of one server that has as many as it may have.

    Attributes:
        let_go_total: connections that were closed for others.
    """

    def __init__(self, limits: ServerLimits) -> None:
        self._shares = Shares(limits.connections)
        self._of: dict[Identity, dict[Connection, None]] = {}
        self.let_go_total = 0
        self._idle_s = limits.crowded_idle_s
        self._look_interval_s = LOOK_S_PER_CONNECTION * limits.connections
        self._let_go_max = max(1, min(LET_GO_MAX, limits.connections // 100))
        self._look_at_s = self._log_at_s = float("-inf")
        self._refused_unsaid = 0

    def add(self, connection: Connection) -> None:
        """Count a connection in the share of its address."""
        self._shares.take(connection.queue, 1)
        self._of.setdefault(connection.queue, {})[connection] = None

    def discard(self, connection: Connection) -> None:
        """Count it no more; it was counted."""
        queue = connection.queue
        self._shares.give_back(queue, 1)
        del self._of[queue][connection]
        if not self._of[queue]:
            del self._of[queue]

    def make_room(self, connections: Iterable[Connection], newcomer: Connection) -> bool:
        """Close a connection for a new one: an idle one, else one of the greediest address; False: refuse the new one.

        Arguments:
            connections: all that are open.
            newcomer: is not counted yet.
        """
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + self._look_interval_s
            if self._let_go(connections, now_s):
                return True
        if self._shares.make_room(newcomer.queue, 1, self._end_newest):
            return True
        self._refused_unsaid += 1
        if now_s >= self._log_at_s:
            self._log_at_s = now_s + LOG_INTERVAL_S
            _log.warning(
                "refused %d connections: as many are open as may be; %d idle ones were closed so far",
                self._refused_unsaid,
                self.let_go_total,
            )
            self._refused_unsaid = 0
        return False

    def _end_newest(self, queue: Identity) -> bool:
        newest = next(reversed(self._of[queue]))
        self.let_go_total += 1
        newest.end()
        return True

    def _let_go(self, connections: Iterable[Connection], now_s: float) -> bool:
        """Close some that are idle, and return whether one of them has gone at once."""
        since = [(one.idle_since_s, one) for one in connections]
        idle = [(since_s, one) for since_s, one in since if since_s is not None and now_s - since_s >= self._idle_s]
        idle.sort(key=lambda pair: pair[0])
        have_gone = [connection.make_way() for _, connection in idle[: self._let_go_max]]
        self.let_go_total += len(have_gone)
        return any(have_gone)
