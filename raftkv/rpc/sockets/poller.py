"""Which sockets have something to say: one epoll for all connections of a server.

    poller = open_poller(loop, cork)
    poller.watch(fd, transport, READ | WRITE)
    poller.watch(fd, transport, 0)              # before the descriptor is closed
    poller.close()

Invariants:

1. A turn of the loop serves at most ``EVENTS_A_TURN`` of them; the kernel names the others first next time.
2. What they have for clients leaves when all are served: the cork is held meanwhile, and a turn of the node that they
   made due runs first.
3. A socket that is watched for nothing is not watched: the kernel tells of broken connections whatever one asks for,
   and nobody would listen.
"""

from __future__ import annotations

import asyncio
import select
from typing import Final, Protocol

from raftkv.rpc.cork import Cork

READ: Final = 1
"""EPOLLIN."""
WRITE: Final = 4
"""EPOLLOUT."""

EVENTS_A_TURN: Final = 256


class Watched(Protocol):
    """A socket's owner. Neither call raises anything, and either may come without reason."""

    def on_readable(self) -> None:
        """There is something to read, or the connection is broken."""

    def on_writable(self) -> None:
        """There is room for more, or the connection is broken."""


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
    """Asks the kernel once a turn for all its sockets.

    Arguments:
        loop: of all owners.
        cork: held while they are called.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, cork: Cork) -> None:
        self._loop = loop
        self._cork = cork
        self._epoll = select.epoll()
        self._owners: dict[int, Watched] = {}
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
            self._owners[fd] = owner
            self._epoll.register(fd, events)

    def _serve(self) -> None:
        owners, cork = self._owners, self._cork
        cork.begin_pass()
        try:
            for fd, events in self._epoll.poll(0, EVENTS_A_TURN):
                # Who was watched when the kernel was asked may have gone since, and another may have its number.
                owner = owners.get(fd)
                if owner is not None and events & ~WRITE:
                    owner.on_readable()
                if owner is not None and events & ~READ:
                    owner.on_writable()
        finally:
            cork.end_pass()

    def close(self) -> None:
        """Implement ``Poller.close``."""
        self._is_closing = True
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._is_closing and not self._owners and not self._epoll.closed:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()


class LoopPoller:
    """Leaves each socket to the loop, where the system has no epoll.

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
