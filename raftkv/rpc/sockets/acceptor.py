"""A listening socket: takes connections, a few a turn, and waits while the system is out of descriptors."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import Final

from raftkv.rpc.sockets.poller import READ, Poller
from raftkv.rpc.sockets.transport import SocketTransport

ACCEPTS_A_TURN: Final = 16
"""Connections accepted in one turn of the loop: each takes a descriptor before it can be refused."""

RETRY_S: Final = 1.0
"""How long nobody is accepted after the system had nothing left for a connection."""

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
        """Take connections, those first that wait."""
        self._retry = None
        self._poller.watch(self._socket.fileno(), self, READ)

    def on_readable(self) -> None:
        """Take some."""
        for _ in range(ACCEPTS_A_TURN):
            try:
                connected, peer_name = self._socket.accept()
            except OSError as error:
                if error.errno in _NOTHING_LEFT:
                    self._wait(error)
                return  # nobody waits, or who waited has gone
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
        """Nobody writes to it."""

    def close(self) -> None:
        """Take no more."""
        if self._retry is not None:
            self._retry.cancel()
        self._poller.watch(self._socket.fileno(), self, 0)
        self._socket.close()
