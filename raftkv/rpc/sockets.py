"""Sockets of a server: polling them, moving bytes, accepting connections.

    EpollPoller        one epoll for all connections of a server, polled by one callback of the loop
    SocketTransport    one connection, in place of asyncio's transport, for the same protocols
    Acceptor           a listening socket

asyncio has all of this. These modules exist for two reasons. A request and its answer cost less: the loop watches one
descriptor instead of one for each client, so a ready client costs no handle and no context. And the work of one loop
turn is limited, however many connections are ready at once, and however much they bring.

Leaves out: binding of addresses (asyncio does it), connections to other servers, TLS (``tls``).

THE POLLER

    poller = open_poller(loop, cork)
    poller.watch(fd, transport, READ | WRITE)
    poller.watch(fd, transport, 0)              # before the descriptor is closed
    poller.close()

Invariants:

1. A pass over the ready sockets ends after ``PASS_S``: hundreds of connections may each bring hundreds of requests at
   once, while heartbeats and timers wait. The following, shorter passes serve the identities in turn, by the time that
   they take (``loop/fair``), until no ready socket is left: an identity with hundreds of busy connections delays
   others by one of them.
2. Output leaves at the end of the pass: the cork is held during it. If the pass makes a turn of the node due, that turn
   runs before the output leaves or, if the pass has used its time, in the next turn of the loop.
3. If a pass brought work for the node, it continues while callers return that were just answered: for ``GATHER_S`` at
   most, and not after ``QUIET_S`` without any. They send their next requests at once, and so share an append, a sync
   and a message to each member. Otherwise the first one to return would have all that for itself, and the others would
   wait for it. This gives 1.2 times the puts of 10 clients of h2load and 1.1 times those of 100, at 0.8 and 0.9 of the
   processor time each.
4. A socket without watched events is not registered: otherwise the kernel would report its broken connection in every
   pass, and no code would handle it.

THE TRANSPORT

    transport = SocketTransport(loop, poller, connected, peer_name)
    transport.open(protocol)
    Acceptor(loop, poller, listening, factory).start()

``SocketTransport`` does what asyncio's transport does, in the same order: a protocol gets ``connection_made`` first,
and ``connection_lost`` once, last, and from the loop, never from within one of its own calls. Written bytes leave at
once, as far as the kernel takes them. It is not a subclass of ``asyncio.Transport``: compiled, that would give the
object a dictionary. ``open`` casts it. A protocol's own buffer must have space for ``READ_BYTES``. Left out, because no
protocol here calls them: ``writelines``, ``write_eof``.

``Acceptor`` accepts a few connections per turn, and pauses while the system has no free descriptors.
"""

from __future__ import annotations

import asyncio
import errno
import select
import socket
from collections.abc import Callable
from time import monotonic
from typing import Any, Final, Protocol, cast

from raftkv.loop.cork import Cork
from raftkv.loop.cycle_free import nothing
from raftkv.loop.fair import EQUAL, FairQueue, Identity, Weights
from raftkv.rpc.shares import identity_of_peer, queue_of

READ: Final = 1
"""EPOLLIN."""
WRITE: Final = 4
"""EPOLLOUT."""

EVENTS_A_PASS: Final = 256
"""Most events that the kernel reports at once."""
PASS_S: Final = 0.005
PASS_IN_TURNS_S: Final = 0.002
"""The same while the ready sockets are too many for one pass: a put of an identity that is served first takes four."""
GATHER_S: Final = 0.0005
QUIET_S: Final = 0.00003
"""A few times what a fast client takes between two requests. The kernel offers a shorter wait only with
``epoll_pwait2``, and would not keep it: a sleeping thread takes longer to wake."""


class Watched(Protocol):
    """The owner of a socket. Its methods must not raise, and may be called without reason."""

    def on_readable(self) -> None:
        """Read: there is input, or the connection is broken."""

    def on_writable(self) -> None:
        """Write: there is space again, or the connection is broken."""

    def queue(self) -> Identity:
        """Return the queue in which the socket waits when one pass cannot serve all."""


class Poller(Protocol):
    """Watches sockets of one loop."""

    def watch(self, fd: int, owner: Watched, events: int) -> None:
        """Set the watched events of a socket.

        Arguments:
            fd: descriptor of the socket.
            owner: called when an event occurs.
            events: ``READ``, ``WRITE``, both, or 0 for none.
        """

    def close(self) -> None:
        """Close as soon as nothing is watched: a connection may still have its last bytes to send."""


class EpollPoller:
    """Polls all sockets with one system call.

    Arguments:
        loop: event loop of all owners.
        cork: held while owners are called.
        clock: returns seconds.
        weights: as in ``FairQueue``.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        cork: Cork,
        clock: Callable[[], float] = monotonic,
        weights: Weights = EQUAL,
    ) -> None:
        self._loop = loop
        self._cork = cork
        self._clock = clock
        self._epoll = select.epoll()
        self._owners: dict[int, Watched] = {}
        self._left = FairQueue[int](weights=weights)
        """Descriptors that the kernel has reported and that have not been served yet."""
        self._left_events: dict[int, int] = {}
        self._last_served: dict[int, int] = {}
        """While some are left: the sequence number under which each descriptor was last served."""
        self._number = 0
        self._is_closing = False
        loop.add_reader(self._epoll.fileno(), self._serve)

    def watch(self, fd: int, owner: Watched, events: int) -> None:
        """Implement ``Poller.watch``."""
        if not events:
            if self._owners.pop(fd, None) is not None:
                self._epoll.unregister(fd)
                self._close_if_done()
        elif fd in self._owners:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)  # may fail: the kernel limits watched descriptors
            self._owners[fd] = owner

    def _serve(self) -> None:
        self._cork.begin_pass()
        until = self._clock() + (PASS_IN_TURNS_S if self._left_events else PASS_S)
        try:
            named = self._epoll.poll(0, EVENTS_A_PASS)
            if self._left_events:
                self._pass_in_turns(named, until)
            else:
                self._pass(named, until)
            if self._cork.awaits_more:
                self._gather()
        finally:
            self._cork.end_pass(is_late=self._clock() > until)

    def _gather(self) -> None:
        """Continue the pass while expected callers return."""
        cork, clock = self._cork, self._clock
        last = clock()
        until = last + GATHER_S
        while cork.awaits_more and not self._left_events and last < until:
            named = self._epoll.poll(0, EVENTS_A_PASS)
            now = clock()
            if named:
                self._pass(named, until)
                last = clock()
            elif now > last + QUIET_S:
                cork.expect_none()

    def _pass(self, named: list[tuple[int, int]], until: float) -> None:
        owners, clock = self._owners, self._clock
        for at, (fd, events) in enumerate(named):
            if at and clock() > until:
                self._leave(named[at:])
                return
            # The owner at the time of the poll may be gone, and another may have its descriptor number.
            owner = owners.get(fd)
            if owner is not None and events & ~WRITE:
                owner.on_readable()
            if owner is not None and events & ~READ:
                owner.on_writable()

    def _pass_in_turns(self, named: list[tuple[int, int]], until: float) -> None:
        """Serve left and new descriptors by identity; within an identity the least recently served first."""
        last_served = self._last_served
        self._leave(sorted(named, key=lambda one: last_served.get(one[0], 0)))
        clock, left = self._clock, self._left
        now = clock()
        while len(left) and now <= until:
            began = now
            identity, fd = left.pop()
            self._number += 1
            last_served[fd] = self._number
            self._pass([(fd, self._left_events.pop(fd))], until)
            now = clock()
            left.charge(identity, now - began)
        if not len(left):
            last_served.clear()

    def _leave(self, named: list[tuple[int, int]]) -> None:
        for fd, events in named:
            owner = self._owners.get(fd)
            if fd in self._left_events:
                self._left_events[fd] |= events
            elif owner is not None:
                self._left_events[fd] = events
                self._left.add(owner.queue(), fd)

    def close(self) -> None:
        """Implement ``Poller.close``."""
        self._is_closing = True
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._is_closing and not self._owners and not self._epoll.closed:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()


class LoopPoller:
    """Lets the loop watch each socket, on systems without epoll: there are no passes.

    Arguments:
        loop: event loop of all owners.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: dict[int, int] = {}

    def watch(self, fd: int, owner: Watched, events: int) -> None:
        """Implement ``Poller.watch``."""
        before = self._events.pop(fd, 0)
        if events:
            self._events[fd] = events
        if events & READ and not before & READ:
            self._loop.add_reader(fd, owner.on_readable)
        elif before & READ and not events & READ:
            self._loop.remove_reader(fd)
        if events & WRITE and not before & WRITE:
            self._loop.add_writer(fd, owner.on_writable)
        elif before & WRITE and not events & WRITE:
            self._loop.remove_writer(fd)

    def close(self) -> None:
        """Implement ``Poller.close``: there is nothing to release."""


def open_poller(loop: asyncio.AbstractEventLoop, cork: Cork, weights: Weights = EQUAL) -> Poller:
    """Return the best poller that the system has."""
    return EpollPoller(loop, cork, weights=weights) if hasattr(select, "epoll") else LoopPoller(loop)


HIGH_BYTES: Final = 64 * 1024
"""Waiting bytes above which a protocol is asked to pause, unless it sets its own limits."""

READ_BYTES: Final = 32 * 1024
"""Most bytes read at once: as small requests they are 25 ms of work, interpreted."""

READING_S: Final = 0.001
READS_MAX: Final = 8
"""A full read that the protocol handles faster than ``READING_S`` is part of a large body: more is read at once."""

_BUSY: Final = (BlockingIOError, InterruptedError)


class SocketTransport:
    """A connected socket.

    Arguments:
        loop: event loop of the protocol.
        poller: watches the socket.
        connected: non-blocking socket; closed with the transport.
        peer_name: address of the peer.
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
        """Bytes not taken by the kernel yet."""
        self._high_bytes = HIGH_BYTES
        self._low_bytes = HIGH_BYTES // 4
        self._is_paused = False
        """Whether the protocol has paused reading."""
        self._has_paused = False
        """Whether the protocol was asked to pause writing."""
        self._is_closing = False
        self._has_ended = False
        """Whether sending has ended; ``connection_lost`` is scheduled or done."""
        self._events = 0

    def open(self, protocol: asyncio.BaseProtocol) -> None:
        """Tell the protocol, then start reading.

        Arguments:
            protocol: gets all events until ``set_protocol`` replaces it.
        """
        self.set_protocol(protocol)
        try:
            protocol.connection_made(cast(asyncio.Transport, self))
            self._watch()
        except Exception as error:
            self._report(error, "connection_made")

    def _watch(self) -> None:
        """Watch the socket for the events that are needed now."""
        events = 0 if self._is_paused or self._is_closing else READ
        if self._waiting:
            events |= WRITE
        if events != self._events:
            self._events = events
            self._poller.watch(self._fd, self, events)

    # ---- bytes in

    def queue(self) -> Identity:
        """Return the queue of the connection's user, if the protocol knows one, else of its address."""
        found: Identity | None = getattr(self._protocol, "queue", None)
        if found is None:
            host = self._peer_name[0] if isinstance(self._peer_name, tuple) else ""
            found = queue_of(identity_of_peer(f"[{host}]:0" if ":" in host else f"{host}:0"))
        return found

    def on_readable(self) -> None:
        """Read, and pass the bytes to the protocol."""
        until = monotonic() + READING_S
        for _ in range(READS_MAX):
            if self._is_paused or self._is_closing or self._read() < READ_BYTES or monotonic() > until:
                return

    def _read(self) -> int:
        """Read once. Returns the number of bytes."""
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
        """Close when the peer has ended its half, unless the protocol keeps the connection open."""
        if self._protocol.eof_received():
            self.pause_reading()
        else:
            self.close()

    # ---- bytes out

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send, and keep what the kernel does not take."""
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
        """Send waiting bytes."""
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
        try:
            if self._has_paused and len(self._waiting) <= self._low_bytes:
                self._has_paused = False
                self._protocol.resume_writing()
            if not self._waiting:
                getattr(self._protocol, "all_sent", nothing)()
        except Exception as error:
            self._report(error, "resume_writing")
        if self._is_closing and not self._waiting:
            self._end(None)

    # ---- the end

    def close(self) -> None:
        """Stop reading, send waiting bytes, then end."""
        if not self._is_closing:
            self._is_closing = True
            if self._waiting:
                self._watch()
            else:
                self._end(None)

    def abort(self) -> None:
        """Abort the connection."""
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
        """Report an exception of the protocol, and end the connection: its state is unknown."""
        context = {"message": f"a connection's protocol failed: {call}", "exception": error}
        self._loop.call_exception_handler(context)
        self._end(error)

    # ---- called by protocols

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Pass received bytes to a protocol from now on."""
        self._protocol = protocol
        self._is_buffered = isinstance(protocol, asyncio.BufferedProtocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return the current protocol."""
        return cast(asyncio.BaseProtocol, self._protocol)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return the ``socket``, its ``sockname``, or the ``peername``."""
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
        """Stop reading for now."""
        self._is_paused = True
        self._watch()

    def resume_reading(self) -> None:
        """Resume reading."""
        self._is_paused = False
        self._watch()

    def get_write_buffer_size(self) -> int:
        """Return the bytes that wait for the socket."""
        return len(self._waiting)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set when ``pause_writing`` and ``resume_writing`` are called."""
        self._high_bytes = HIGH_BYTES if high is None else high
        self._low_bytes = self._high_bytes // 4 if low is None else low

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Return the limits, the lower one first."""
        return self._low_bytes, self._high_bytes


ACCEPTS_A_TURN: Final = 16
"""Connections accepted in one loop turn: each takes a descriptor before it can be refused."""

RETRY_S: Final = 1.0
"""Pause after the system had no descriptor or memory for a connection."""

_NOTHING_LEFT: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """Accepts the connections of one listening socket.

    Arguments:
        loop: event loop of the protocols.
        poller: watches the socket and its connections.
        listening: non-blocking socket; closed with the acceptor.
        factory: creates the protocol of a connection.
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
        """Accept connections from now on; those that already wait come first."""
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
                return  # no client waits, or it has left
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
        """Return an identity of no client: connecting clients are not known yet."""
        return ""

    def close(self) -> None:
        """Accept no more connections."""
        if self._retry is not None:
            self._retry.cancel()
        self._poller.watch(self._socket.fileno(), self, 0)
        self._socket.close()
