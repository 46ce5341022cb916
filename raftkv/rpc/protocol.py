"""The asyncio side of an HTTP/2 connection, the same for both ends: bytes between a transport and a core.

Invariants:

1. One write per loop turn and connection, unless there is more than ``transport_buffer_bytes`` to say.
2. While the peer does not read (the transport's buffer is above its high-water mark) nothing is pulled from the core,
   so what waits is bounded by the core's own limits; and a peer that keeps sending control frames meanwhile is not
   read either.
3. A peer that reads nothing for ``write_stall_timeout_s`` is disconnected; one that reads slowly is not (``liveness``).
"""

from __future__ import annotations

import asyncio
import threading
from typing import Generic, Protocol, TypeVar

from mypy_extensions import mypyc_attr

from raftkv.loop.cycle_free import GONE, release
from raftkv.rpc.liveness import StallGuard

READ_BYTES = 256 * 1024
"""Most bytes taken from one socket in one go."""

CLOSE_TIMEOUT_S = 10.0
"""A peer that lets nothing through for so long is cut, while a connection that we close still has something to say."""

_of_thread = threading.local()


def read_buffer() -> memoryview:
    """Return this thread's receive buffer.

    One for all connections of a loop: what was read is consumed before anything else is. Receiving into it instead of
    into a fresh 256 KiB object (what ``asyncio.Protocol`` does) was measured to make a small read five times cheaper.
    """
    buffer: memoryview | None = getattr(_of_thread, "buffer", None)
    if buffer is None:
        buffer = _of_thread.buffer = memoryview(bytearray(READ_BYTES))
    return buffer


class Core(Protocol):
    """A sans-IO connection, as its transport uses it."""

    closing: bool
    drop_unsent: bool
    """The connection ends because its peer does not read: what is written already need not arrive."""

    def receive(self, data: bytes | memoryview) -> None:
        """Take bytes from the peer."""

    def pull(self, amount: int) -> bytes:
        """Return at most ``amount`` bytes to send."""

    def block(self, is_blocked: bool) -> None:
        """The socket takes nothing, or something again."""

    def lost(self) -> None:
        """The transport has gone."""


class DrainWatcher(Protocol):
    """A stream whose sender waits for room in its send buffer."""

    @property
    def send_buffer_size(self) -> int:
        """Bytes that are queued and not yet taken for the wire."""

    def drained(self) -> None:
        """Some of them have left."""

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
        self._finished = False
        transport.set_write_buffer_limits(high=buffer_bytes, low=buffer_bytes // 4)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the transport shall put what it reads."""
        return self._read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes have been read."""
        self.feed(self._read_buffer[:nbytes])

    def feed(self, data: bytes | memoryview) -> None:
        """Hand bytes to the core."""
        self.last_read_s = self._loop.time()
        if not self.writable:
            self._count_blocked_input(data)
        self.core.receive(data)

    def _count_blocked_input(self, data: bytes | memoryview) -> None:
        self._blocked_input += len(data)
        if self._blocked_input > self._blocked_input_bytes:
            self.transport.pause_reading()

    def flush(self) -> None:
        """Send what the core has, as far as the peer reads it."""
        pull, size = self.core.pull, self._buffer_bytes
        while self.writable and not self._finished:
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
        """Close the transport after what is written has gone out."""
        if not self._finished:
            self._finished = True
            if not self.transport.is_closing():  # asyncio's TLS transport breaks when it is closed twice
                self.transport.close()
            if self.transport.get_write_buffer_size():
                # A peer that does not read must not keep us from closing.
                self._stall.disarm()
                self._stall = StallGuard(self._loop, CLOSE_TIMEOUT_S)
                self._stall.arm(self.transport, self.transport.abort)

    def abort(self) -> None:
        """Cut the connection: nothing more is sent."""
        self._finished = True
        self.transport.abort()

    @property
    def ended_here(self) -> bool:
        """True once this end has closed or cut the connection; what is lost otherwise was lost by the peer."""
        return self._finished

    def pause_writing(self) -> None:
        """The peer does not keep up: stop pulling."""
        self.writable = False
        self.core.block(True)
        self._blocked_input = 0
        self._stall.arm(self.transport, self.abort)

    def resume_writing(self) -> None:
        """The peer has caught up."""
        self.writable = True
        self.core.block(False)
        if not self._finished:
            self._stall.disarm()
        if self._blocked_input > self._blocked_input_bytes and not self._finished:
            self._read_on()
        self.flush()

    def _read_on(self) -> None:
        """Read the peer again, unless there is another reason not to."""
        self.transport.resume_reading()

    def eof_received(self) -> bool | None:
        """The peer will send nothing more: HTTP/2 has no half-closed connections, so close."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The transport has gone."""
        self._finished = True
        self.writable = False
        self._stall.disarm()
        self.core.lost()
        release(self.transport)
        self.transport = GONE
