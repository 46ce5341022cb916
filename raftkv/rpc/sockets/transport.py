"""The sockets of a server: one connection as a transport of asyncio, and the listening socket that accepts them.

    transport = SocketTransport(loop, poller, connected, peer_name)
    transport.open(protocol)
    Acceptor(loop, poller, listening, factory).start()

``SocketTransport`` does what asyncio's transport does, in the same order: a protocol hears ``connection_made`` first,
and ``connection_lost`` once, last, and from the loop, never from within a call of its own. Written bytes leave at once,
as far as the kernel takes them. It is no subclass of ``asyncio.Transport``: compiled, that would make it an object with
a dictionary. ``open`` hands it on as one. A protocol that brings a buffer has room for ``READ_BYTES`` in it. Left out,
because no protocol here calls them: ``writelines``, ``write_eof``.

``Acceptor`` takes a few connections a turn, and waits while the system is out of descriptors.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from time import monotonic
from typing import Any, Final, cast

from raftkv.rpc.shares import Identity, identity_of_peer, queue_of
from raftkv.rpc.sockets.poller import READ, WRITE, Poller

HIGH_BYTES: Final = 64 * 1024
"""Bytes that wait above which a protocol is asked to pause, unless it sets its own limits."""

READ_BYTES: Final = 32 * 1024
"""Most bytes taken in one go: as small requests they are 25 ms of work, interpreted."""

READING_S: Final = 0.001
READS_MAX: Final = 8
"""A full read that the protocol handles in less than this is part of a large body: then more is read at once."""

_BUSY: Final = (BlockingIOError, InterruptedError)


class SocketTransport:
    """A connected socket.

    Arguments:
        loop: of the protocol.
        poller: watches the socket.
        connected: does not block; closed with the transport.
        peer_name: address of the other end.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, poller: Poller, connected: socket.socket, peer_name: Any
    ) -> None:
        self._loop = loop
        self._poller = poller
        self._socket = connected
        self._fd = connected.fileno()
        self._peer_name = peer_name
        self._protocol: Any = None
        self._is_buffered = False
        self._waiting = bytearray()
        """Bytes that the kernel has not taken yet."""
        self._high_bytes = HIGH_BYTES
        self._low_bytes = HIGH_BYTES // 4
        self._is_paused = False
        """The protocol reads nothing."""
        self._has_paused = False
        """The protocol was asked not to write."""
        self._is_closing = False
        self._has_ended = False
        """Nothing is sent any more; ``connection_lost`` is on its way."""
        self._events = 0

    def open(self, protocol: asyncio.BaseProtocol) -> None:
        """Begin: tell the protocol, then read.

        Arguments:
            protocol: hears what happens until ``set_protocol`` names another.
        """
        self.set_protocol(protocol)
        try:
            protocol.connection_made(cast(asyncio.Transport, self))
            self._watch()
        except Exception as error:
            self._report(error, "connection_made")

    def _watch(self) -> None:
        """Have the socket watched for what is of use now."""
        events = 0 if self._is_paused or self._is_closing else READ
        if self._waiting:
            events |= WRITE
        if events != self._events:
            self._events = events
            self._poller.watch(self._fd, self, events)

    # ---- bytes in

    def queue(self) -> Identity:
        """Return the queue of its user, as far as the protocol knows one, else of its address."""
        found: Identity | None = getattr(self._protocol, "queue", None)
        if found is None:
            host = self._peer_name[0] if isinstance(self._peer_name, tuple) else ""
            found = queue_of(identity_of_peer(f"[{host}]:0" if ":" in host else f"{host}:0"))
        return found

    def on_readable(self) -> None:
        """Read, and hand it over."""
        until = monotonic() + READING_S
        for _ in range(READS_MAX):
            if self._is_paused or self._is_closing or self._read() < READ_BYTES or monotonic() > until:
                return

    def _read(self) -> int:
        """Read once; how many bytes there were."""
        data = b""
        try:
            if self._is_buffered:
                size = self._socket.recv_into(self._protocol.get_buffer(READ_BYTES), READ_BYTES)
            else:
                data = self._socket.recv(READ_BYTES)
                size = len(data)
        except _BUSY:
            return 0
        except OSError as error:
            self._end(error)
            return 0
        try:
            if not size:
                self._on_end()
            elif self._is_buffered:
                self._protocol.buffer_updated(size)
            else:
                self._protocol.data_received(data)
        except Exception as error:
            self._report(error, "of what was read")
        return size

    def _on_end(self) -> None:
        """The other end sends nothing more: so do we, unless the protocol has something to say."""
        if self._protocol.eof_received():
            self.pause_reading()
        else:
            self.close()

    # ---- bytes out

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send, or keep what the kernel does not take."""
        if self._is_closing or not data:
            return
        if not self._waiting:
            try:
                sent = self._socket.send(data)
            except _BUSY:
                sent = 0
            except OSError as error:
                self._end(error)
                return
            if sent == len(data):
                return
            data = memoryview(data)[sent:]
        self._waiting += data
        self._watch()
        if len(self._waiting) > self._high_bytes and not self._has_paused:
            self._has_paused = True
            self._protocol.pause_writing()

    def on_writable(self) -> None:
        """Send the queue."""
        if not self._waiting:
            return
        try:
            sent = self._socket.send(self._waiting)
        except _BUSY:
            return
        except OSError as error:
            self._end(error)
            return
        del self._waiting[:sent]
        self._watch()
        if self._has_paused and len(self._waiting) <= self._low_bytes:
            self._has_paused = False
            try:
                self._protocol.resume_writing()
            except Exception as error:
                self._report(error, "resume_writing")
        if self._is_closing and not self._waiting:
            self._end(None)

    # ---- the end

    def close(self) -> None:
        """Read nothing more, send the queue, and end."""
        if not self._is_closing:
            self._is_closing = True
            if self._waiting:
                self._watch()
            else:
                self._end(None)

    def abort(self) -> None:
        """Cut the connection."""
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self._has_ended:
            return
        self._has_ended = self._is_closing = True
        self._waiting = bytearray()
        self._watch()
        self._loop.call_soon(self._lost, error)

    def _lost(self, error: Exception | None) -> None:
        protocol, self._protocol = self._protocol, None
        try:
            protocol.connection_lost(error)
        finally:
            self._socket.close()

    def _report(self, error: Exception, call: str) -> None:
        """A protocol has raised: the state of its connection is unknown."""
        context = {"message": f"a connection's protocol failed: {call}", "exception": error}
        self._loop.call_exception_handler(context)
        self._end(error)

    # ---- what a protocol asks for

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Hand what is read to a protocol."""
        self._protocol = protocol
        self._is_buffered = isinstance(protocol, asyncio.BufferedProtocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return what was set."""
        return cast(asyncio.BaseProtocol, self._protocol)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return the ``socket``, its ``sockname``, or the other's ``peername``."""
        if name == "socket":
            return self._socket
        if name == "peername":
            return self._peer_name
        if name == "sockname":
            try:
                return self._socket.getsockname()
            except OSError:
                return None
        return default

    def is_closing(self) -> bool:
        """Return whether the connection is closed, or about to be."""
        return self._is_closing

    def is_reading(self) -> bool:
        """Return whether the socket is read."""
        return not self._is_paused and not self._is_closing

    def pause_reading(self) -> None:
        """Read no more for now."""
        self._is_paused = True
        self._watch()

    def resume_reading(self) -> None:
        """Read again."""
        self._is_paused = False
        self._watch()

    def get_write_buffer_size(self) -> int:
        """Bytes that wait for the socket."""
        return len(self._waiting)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set when ``pause_writing`` and ``resume_writing`` are called."""
        self._high_bytes = HIGH_BYTES if high is None else high
        self._low_bytes = self._high_bytes // 4 if low is None else low

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Return what was set."""
        return self._low_bytes, self._high_bytes


ACCEPTS_A_TURN: Final = 16
"""Connections accepted in one turn of the loop: each takes a descriptor before it can be refused."""

RETRY_S: Final = 1.0
"""Pause after the system was out of descriptors or memory for a connection."""

_NOTHING_LEFT: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """Takes the connections of one listening socket.

    Arguments:
        loop: of the protocols.
        poller: watches the socket and its connections.
        listening: does not block; closed with this.
        factory: makes the protocol of a connection.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        poller: Poller,
        listening: socket.socket,
        factory: Callable[[], asyncio.BaseProtocol],
    ) -> None:
        self._loop = loop
        self._poller = poller
        self._socket = listening
        self._factory = factory
        self._retry: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Accept connections from now on, first those that wait."""
        self._retry = None
        self._poller.watch(self._socket.fileno(), self, READ)

    def on_readable(self) -> None:
        """Accept some connections."""
        for _ in range(ACCEPTS_A_TURN):
            try:
                connected, peer_name = self._socket.accept()
            except OSError as error:
                if error.errno in _NOTHING_LEFT:
                    self._wait(error)
                return  # no client waits, or the one that waited has left
            connected.setblocking(False)
            if connected.family != socket.AF_UNIX:
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            SocketTransport(self._loop, self._poller, connected, peer_name).open(self._factory())

    def _wait(self, error: OSError) -> None:
        self._poller.watch(self._socket.fileno(), self, 0)
        self._retry = self._loop.call_later(RETRY_S, self.start)
        context = {"message": "socket.accept() out of system resource", "exception": error, "socket": self._socket}
        self._loop.call_exception_handler(context)

    def on_writable(self) -> None:
        """Never called: the socket is not watched for writing."""

    def queue(self) -> Identity:
        """Return the member's own: clients that connect are not known yet."""
        return ""

    def close(self) -> None:
        """Accept no more connections."""
        if self._retry is not None:
            self._retry.cancel()
        self._poller.watch(self._socket.fileno(), self, 0)
        self._socket.close()
