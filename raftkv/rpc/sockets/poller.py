"""Which sockets have something to say: one epoll for all connections of a server.

    poller = open_poller(loop, cork)
    poller.watch(fd, transport, READ | WRITE)
    poller.watch(fd, transport, 0)              # before the descriptor is closed
    poller.close()

Invariants:

1. A pass over them ends after ``PASS_S``: hundreds of connections may each bring hundreds of requests at once, and
   heartbeats and timers wait meanwhile. In the passes that follow, identities are served in turn by the time that they
   take (``loop/fair``), until none is left: an identity with hundreds of busy connections delays others by one of them.
2. Their output leaves when the pass ends: the cork is held meanwhile. A turn of the node that they made
   due runs before that, or, if the pass has taken its time, in the next turn of the loop.
3. A pass that brought work for the node goes on while callers return that were answered a moment ago: ``GATHER_S`` at
   most, and not when none comes for ``QUIET_S``. They ask again at once, and share an append, a sync and a message to
   each member. Else the first to come back would have all that for itself, and the others wait for it. It makes 1.2
   times the puts of 10 clients of h2load and 1.1 times those of 100, each for 0.8 and 0.9 of the processor time.
4. A socket without events to wait for is not registered: the kernel would report its broken connection in every pass,
   and no code would handle it.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from time import monotonic
from typing import Final, Protocol

from raftkv.loop.cork import Cork
from raftkv.loop.fair import FairQueue, Identity

READ: Final = 1
"""EPOLLIN."""
WRITE: Final = 4
"""EPOLLOUT."""

EVENTS_A_PASS: Final = 256
"""Most that the kernel names at a time."""
PASS_S: Final = 0.005
GATHER_S: Final = 0.0005
QUIET_S: Final = 0.00003
"""A few times what a fast client takes between two requests. A shorter wait cannot be asked of the kernel but with
``epoll_pwait2``, and would not be met: a thread that sleeps takes longer to wake."""


class Watched(Protocol):
    """A socket's owner. Neither call raises anything, and either may come without reason."""

    def on_readable(self) -> None:
        """There is something to read, or the connection is broken."""

    def on_writable(self) -> None:
        """There is room for more, or the connection is broken."""

    def queue(self) -> Identity:
        """Return in which queue it waits when there is more than one pass can do."""


class Poller(Protocol):
    """Watches sockets of one loop."""

    def watch(self, fd: int, owner: Watched, events: int) -> None:
        """Set what a socket is watched for.

        Arguments:
            fd: its descriptor.
            owner: is called.
            events: ``READ``, ``WRITE``, both, or 0 for nothing.
        """

    def close(self) -> None:
        """End when nothing is watched any more: a connection may still have its last bytes to send."""


class EpollPoller:
    """Asks the kernel for all its sockets at once.

    Arguments:
        loop: of all owners.
        cork: held while they are called.
        clock: gives seconds.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, cork: Cork, clock: Callable[[], float] = monotonic) -> None:
        self._loop = loop
        self._cork = cork
        self._clock = clock
        self._epoll = select.epoll()
        self._owners: dict[int, Watched] = {}
        self._left = FairQueue[int]()
        """Descriptors that the kernel has named, and that are not served yet."""
        self._left_events: dict[int, int] = {}
        self._last_served: dict[int, int] = {}
        """While some are left: the number under which each was served last."""
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
            self._epoll.register(fd, events)  # may fail: the kernel has a limit of what it watches
            self._owners[fd] = owner

    def _serve(self) -> None:
        self._cork.begin_pass()
        until = self._clock() + PASS_S
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
        """Continue the pass while expected callers come."""
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
            # The owner when the kernel was asked may have gone since, and another may have its number.
            owner = owners.get(fd)
            if owner is not None and events & ~WRITE:
                owner.on_readable()
            if owner is not None and events & ~READ:
                owner.on_writable()

    def _pass_in_turns(self, named: list[tuple[int, int]], until: float) -> None:
        """Serve those that were left, and others, by identity; within one, in the order in which they were served."""
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
    """Leaves each socket to the loop, where the system has no epoll: no pass, and no end of one.

    Arguments:
        loop: of all owners.
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
        """Implement ``Poller.close``: there is nothing to give back."""


def open_poller(loop: asyncio.AbstractEventLoop, cork: Cork) -> Poller:
    """Return the best poller that the system has."""
    return EpollPoller(loop, cork) if hasattr(select, "epoll") else LoopPoller(loop)
