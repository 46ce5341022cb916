"""A server's HTTP/2 connection between its transport and its core: keepalive, and the graceful close.

Owns the timers of a connection, and when what its core has to say leaves: at the end of each turn that made some of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from raftkv.loop.cork import Cork
from raftkv.loop.cycle_free import nothing
from raftkv.loop.limiter import Backlog
from raftkv.rpc.protocol import KEEPALIVE_PING, H2Protocol, Keepalive
from raftkv.rpc.server.core import ServerCore
from raftkv.rpc.shares import Identity, queue_of


class ServerH2Protocol(H2Protocol[ServerCore]):
    """One connection.

    Arguments:
        core: of the connection; this becomes its only owner.
        transport: of its socket, or of TLS.
        cork: flushes it at the end of a turn in which it has something to send.
        released: called when the connection is lost.
        backlog: where it waits when it has brought more than one turn may do.
    """

    def __init__(
        self,
        core: ServerCore,
        transport: asyncio.Transport,
        cork: Cork,
        released: Callable[[], None],
        backlog: Backlog,
    ) -> None:
        limits = core.limits
        loop = asyncio.get_running_loop()
        super().__init__(
            core,
            transport,
            loop,
            buffer_bytes=limits.transport_buffer_bytes,
            blocked_input_bytes=limits.blocked_input_bytes,
            write_stall_timeout_s=limits.write_stall_timeout_s,
        )
        self._released = released
        self._backlog = backlog
        self._waits = False
        self._drain_timer: asyncio.TimerHandle | None = None
        self._preface_timer = loop.call_later(limits.preface_timeout_s, self._check_preface)
        self._keepalive = Keepalive(
            loop,
            limits.keepalive_time_s,
            limits.keepalive_timeout_s,
            last_read_s=lambda: self.last_read_s,
            active=lambda: True,
            ping=self._ping,
            dead=self.abort,
        )
        self._check_timer: asyncio.TimerHandle | None = None
        core.account.buffered_size = transport.get_write_buffer_size
        core.attach(partial(cork.mark, self))

    def feed(self, data: bytes | memoryview) -> None:
        """Hand bytes to the core; what it leaves is done in later turns, and nothing is read before."""
        super().feed(data)
        self._wait_if_held()

    @property
    def queue(self) -> Identity:
        """In which its input waits for its turn."""
        return queue_of(self.core.account.identity)

    def _wait_if_held(self) -> None:
        if self.core.h2.is_held and not self._waits and not self._finished:
            self.transport.pause_reading()
            self._wait()

    def _wait(self) -> None:
        if not self._waits:
            self._waits = True
            self._backlog.add(self.go_on, self.queue)

    def go_on(self) -> None:
        """Have the core take on what it has left."""
        self._waits = False
        if self._finished:
            if self.core.close_calls():
                self._wait()
            return
        self.core.go_on()
        self._wait_if_held()
        if self.writable or self._blocked_input <= self._blocked_input_bytes:
            self._read_on()

    def _read_on(self) -> None:
        if not self._waits and not self._finished:
            self.transport.resume_reading()

    def flush(self) -> None:
        """Send the output of the core, and note what of it has left.

        An error ends this connection only: turns of the member's node flush, too.
        """
        try:
            super().flush()
            account, buffered = self.core.account, self.transport.get_write_buffer_size()
            if buffered or account.room != account.allowance or account.reported:
                account.settle(buffered)
                if account.reported and self._check_timer is None:
                    self._check_timer = self._loop.call_later(self.core.stall_interval_s, self._check_stalled)
        except Exception as error:
            context = {"message": "a connection could not be flushed", "exception": error}
            self._loop.call_exception_handler(context)
            self.abort()

    def _check_stalled(self) -> None:
        """Something waits for the client: end what it has not touched for too long."""
        self._check_timer = None
        self.core.end_stalled(self._loop.time())
        self.flush()

    def _check_preface(self) -> None:
        """The client's SETTINGS must have come by now."""
        if not self.core.settled:
            self.abort()

    def _ping(self) -> None:
        self.core.ping(KEEPALIVE_PING)

    @property
    def draining(self) -> bool:
        """True once the client was asked to go."""
        return self._drain_timer is not None

    def drain(self) -> None:
        """Close gracefully: see ``ServerCore.begin_drain``."""
        if self._drain_timer is None:
            self.core.begin_drain()
            timeout_s = self.core.limits.goaway_notice_timeout_s
            self._drain_timer = self._loop.call_later(timeout_s, self.core.finish_drain)

    def connection_lost(self, exc: Exception | None) -> None:
        """The transport has gone."""
        self._preface_timer.cancel()
        self._keepalive.close()
        for timer in (self._drain_timer, self._check_timer):
            if timer is not None:
                timer.cancel()
        self.core.severed = not self.ended_here
        super().connection_lost(exc)
        self._wait()  # for the calls that are lost
        self.core.released()
        self._released()
        self._released = nothing
