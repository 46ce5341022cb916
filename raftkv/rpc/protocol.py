"""The asyncio side of an HTTP/2 connection, for both ends: moves bytes between a transport and a core.

Invariants:

1. One write per loop turn and connection, unless more than ``transport_buffer_bytes`` are pending.
2. While the peer does not read (the transport's buffer is above its high-water mark) nothing is pulled from the core,
   so pending output is bounded by the core's own limits. If such a peer keeps sending control frames, it is not read
   either.
3. A peer that reads nothing for ``write_stall_timeout_s`` is disconnected; one that reads slowly is not.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

from mypy_extensions import mypyc_attr

from raftkv.loop.cycle_free import GONE, nothing, release

# -- liveness -------------------------------------------------------------------------------------------------------
#
# Is the peer of a connection alive, and does it read?
#
#     guard = StallGuard(loop, timeout_s=60.0)
#     guard.arm(transport, transport.abort)     # output waits for the socket: from now on bytes must get through
#     guard.disarm()                            # no output waits, or the connection is lost
#
# ``StallGuard`` disconnects a peer that takes no bytes, but not a slow reader. It counts the bytes that the peer's
# kernel has acknowledged. It does not wait for our buffer to empty: ten megabytes at 100 kB/s take longer than any
# timeout, and a kernel with a large buffer takes no bytes from us for a long time while its peer reads steadily.
# Where the kernel does not report this (unix sockets, systems other than Linux), the size of our buffer counts. There
# is no minimum speed: a peer that reads a byte now and then holds a connection and one buffer, which are bounded.
#
# ``Keepalive`` pings an HTTP/2 peer after silence, and ends the connection when no byte arrives. As in grpc-go, any
# byte from the peer counts as a sign of life.

CHECKS: Final = 4
"""Checks within one timeout: a stalled peer is disconnected at most this fraction of the timeout late."""

_BYTES_ACKED_AT: Final = 120
_BYTES_ACKED: Final = struct.Struct("=Q")


class StallGuard:
    """Disconnects a peer that takes no bytes while output waits. One guard per connection.

    Arguments:
        loop: provides time and timers.
        timeout_s: how long the peer may take no bytes.
    """

    __slots__ = ("_cut", "_handle", "_loop", "_passed", "_since_s", "_timeout_s", "_transport")

    def __init__(self, loop: asyncio.AbstractEventLoop, timeout_s: float) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._timeout_s = timeout_s
        self._cut: Callable[[], None] | None = None
        self._handle: asyncio.TimerHandle | None = None
        self._passed = 0
        self._since_s = 0.0

    def arm(self, transport: asyncio.Transport, cut: Callable[[], None]) -> None:
        """Call ``cut`` once no byte has got through for the timeout. Arming an armed guard has no effect.

        Arguments:
            transport: transport whose progress is measured.
            cut: ends the connection.
        """
        if self._handle is None:
            self._transport, self._cut = transport, cut
            self._passed = _passed_bytes(transport)
            self._since_s = self._loop.time()
            self._look_again()

    def disarm(self) -> None:
        """Stop watching, and drop the reference to the transport."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        self._transport = self._cut = None

    def _look_again(self) -> None:
        self._handle = self._loop.call_later(self._timeout_s / CHECKS, self._look)

    def _look(self) -> None:
        transport, cut, now_s = self._transport, self._cut, self._loop.time()
        if transport is None or cut is None:
            return
        passed = _passed_bytes(transport)
        if passed != self._passed:
            self._passed, self._since_s = passed, now_s
        if now_s - self._since_s < self._timeout_s:
            self._look_again()
            return
        self.disarm()
        cut()


def _passed_bytes(transport: asyncio.Transport) -> int:
    """Return a number that changes when the peer takes bytes."""
    connected = transport.get_extra_info("socket")
    try:
        # Linux: struct tcp_info, tcpi_bytes_acked.
        info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED_AT + _BYTES_ACKED.size)
        (acked,) = _BYTES_ACKED.unpack_from(info, _BYTES_ACKED_AT)
    except (OSError, AttributeError, struct.error):
        return transport.get_write_buffer_size()
    return int(acked)


KEEPALIVE_PING = b"keepaliv"


class Keepalive:
    """Pings one HTTP/2 connection when its peer is silent.

    Arguments:
        loop: provides time and timers.
        time_s: silence before a ping.
        timeout_s: silence after the ping before ``dead`` is called.
        last_read_s: returns the loop time of the last byte received.
        active: returns False while no ping should be sent.
        ping: sends a ping.
        dead: ends the connection.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        time_s: float,
        timeout_s: float,
        *,
        last_read_s: Callable[[], float],
        active: Callable[[], bool],
        ping: Callable[[], None],
        dead: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._time_s = time_s
        self._timeout_s = timeout_s
        self._last_read_s = last_read_s
        self._active = active
        self._ping = ping
        self._dead = dead
        self._pinged_s: float | None = None
        self._handle = loop.call_later(time_s, self._check)

    def _check(self) -> None:
        now, last_read_s = self._loop.time(), self._last_read_s()
        if self._pinged_s is not None and last_read_s > self._pinged_s:
            self._pinged_s = None
        if self._pinged_s is None:
            wait_s = self._ping_if_silent(now, now - last_read_s)
        else:
            wait_s = self._pinged_s + self._timeout_s - now
        if wait_s > 0:
            self._handle = self._loop.call_later(min(wait_s, self._time_s), self._check)
        else:
            self._dead()

    def _ping_if_silent(self, now: float, silence_s: float) -> float:
        """Ping if the peer has been silent long enough. Returns the seconds until the next check."""
        if silence_s < self._time_s:
            return self._time_s - silence_s
        if not self._active():
            return self._time_s
        self._pinged_s = now
        self._ping()
        return self._timeout_s

    def close(self) -> None:
        """Stop watching, and drop the references to the connection."""
        self._handle.cancel()
        self._last_read_s, self._active = _never, bool
        self._ping = self._dead = nothing


def _never() -> float:
    return 0.0


READ_BYTES = 256 * 1024
"""Most bytes read from one socket at once."""

CLOSE_TIMEOUT_S = 10.0
"""Time without progress after which a connection that we are closing is cut, although output is pending."""

_of_thread = threading.local()


def read_buffer() -> memoryview:
    """Return this thread's receive buffer.

    All connections of a loop share it: received bytes are consumed before the next read. Receiving into this buffer
    makes a small read five times cheaper than receiving into a fresh 256 KiB object (as ``asyncio.Protocol`` does).
    """
    buffer: memoryview | None = getattr(_of_thread, "buffer", None)
    if buffer is None:
        buffer = _of_thread.buffer = memoryview(bytearray(READ_BYTES))
    return buffer


class Core(Protocol):
    """A sans-IO connection, as seen by its transport."""

    closing: bool
    drop_unsent: bool
    """Whether the connection ends because its peer does not read: written output need not arrive."""

    def receive(self, data: bytes | memoryview) -> None:
        """Take bytes from the peer."""

    def pull(self, amount: int) -> bytes:
        """Return at most ``amount`` bytes to send."""

    def block(self, is_blocked: bool) -> None:
        """Note that the socket is full, or has room again."""

    def lost(self) -> None:
        """End: the transport is gone."""


class DrainWatcher(Protocol):
    """A stream whose sender waits for space in its send buffer."""

    @property
    def send_buffer_size(self) -> int:
        """Bytes that are queued and not yet taken by the connection."""

    def drained(self) -> None:
        """Note that some of the bytes have left."""

    def __hash__(self) -> int: ...


CoreT = TypeVar("CoreT", bound=Core)


@mypyc_attr(allow_interpreted_subclasses=True)
class H2Protocol(asyncio.BufferedProtocol, Generic[CoreT]):
    """Moves bytes between one transport and one core."""

    def __init__(
        self,
        core: CoreT,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        *,
        buffer_bytes: int,
        blocked_input_bytes: int,
        write_stall_timeout_s: float,
    ) -> None:
        self.core = core
        self.transport = transport
        self.last_read_s = loop.time()
        self.writable = True
        self._read_buffer = read_buffer()
        self._loop = loop
        self._buffer_bytes = buffer_bytes
        self._blocked_input_bytes = blocked_input_bytes
        self._blocked_input = 0
        self._stall = StallGuard(loop, write_stall_timeout_s)
        self.ended_here = False
        """True once this end has closed or aborted the connection; otherwise a loss is due to the peer."""
        transport.set_write_buffer_limits(high=buffer_bytes, low=buffer_bytes // 4)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer that the transport reads into."""
        return self._read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Pass received bytes on."""
        self.feed(self._read_buffer[:nbytes])

    def feed(self, data: bytes | memoryview) -> None:
        """Pass bytes to the core."""
        self.last_read_s = self._loop.time()
        if not self.writable:
            self._count_blocked_input(data)
        self.core.receive(data)

    def _count_blocked_input(self, data: bytes | memoryview) -> None:
        self._blocked_input += len(data)
        if self._blocked_input > self._blocked_input_bytes:
            self.transport.pause_reading()

    def flush(self) -> None:
        """Send pending output of the core, as far as the peer reads it."""
        pull, size = self.core.pull, self._buffer_bytes
        while self.writable and not self.ended_here:
            data = pull(size)
            if data:
                self.transport.write(data)
            if len(data) < size:
                break
        if self.core.closing:
            if self.writable:
                self.finish()
            elif self.core.drop_unsent:
                self.abort()

    def finish(self) -> None:
        """Close the transport after its written output has left."""
        if not self.ended_here:
            self.ended_here = True
            if not self.transport.is_closing():  # asyncio's TLS transport breaks when it is closed twice
                self.transport.close()
            if self.transport.get_write_buffer_size():
                # A peer that does not read must not keep us from closing.
                self._stall.disarm()
                self._stall = StallGuard(self._loop, CLOSE_TIMEOUT_S)
                self._stall.arm(self.transport, self.transport.abort)

    def abort(self) -> None:
        """Abort the connection: pending output is dropped."""
        self.ended_here = True
        self.transport.abort()

    def pause_writing(self) -> None:
        """Stop pulling from the core: the peer does not keep up."""
        self.writable = False
        self.core.block(True)
        self._blocked_input = 0
        self._stall.arm(self.transport, self.abort)

    def resume_writing(self) -> None:
        """Continue: the peer has caught up."""
        self.writable = True
        self.core.block(False)
        if not self.ended_here:
            self._stall.disarm()
        if self._blocked_input > self._blocked_input_bytes and not self.ended_here:
            self._read_on()
        self.flush()

    def _read_on(self) -> None:
        """Resume reading, unless there is another reason not to."""
        self.transport.resume_reading()

    def eof_received(self) -> bool | None:
        """Close: the peer sends nothing more, and HTTP/2 has no half-closed connections."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Release everything: the transport is gone."""
        self.ended_here = True
        self.writable = False
        self._stall.disarm()
        self.core.lost()
        release(self.transport)
        self.transport = GONE
