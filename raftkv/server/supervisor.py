"""What a member tells the program that started it, as systemd's units of ``Type=notify`` want to hear it.

Owns the datagrams of ``sd_notify(3)``: ``READY=1`` once clients are served, ``STOPPING=1`` when it begins to stop, and
``WATCHDOG=1`` while the event loop turns: a loop that hangs says nothing, so systemd ends the process and starts it
anew. Without ``NOTIFY_SOCKET`` in the environment nothing is sent and nothing is done.

    supervisor = Supervisor.of(os.environ)     # takes the variables out: child processes are not to speak for a member
    supervisor.feed_watchdog(loop)
    supervisor.ready("serves clients on http://10.0.0.1:2379")

A message that cannot be sent is a line in the log and never an error: a member serves without its supervisor too. One
for which there is no room in the socket, as when a machine starts all that it has, is sent again.

Leaves out: sockets of other machines (``vsock:``), reloading (a member has nothing to reload), file descriptors kept
over restarts.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import socket
from collections.abc import MutableMapping
from typing import Final

_log = logging.getLogger(__name__)

FEEDS_AN_INTERVAL: Final = 3
"""How often the watchdog is fed in the time after which it ends the process; systemd advises two times at least."""

RETRY_S: Final = 0.1
"""Rest before a message is sent again that systemd had no room for: it would end a member that it thinks to start."""


class Supervisor:
    """The program that started this process, if it wants to hear from it.

    Arguments:
        address: of its socket: a path, or ``@`` and a name outside the file system; empty: no supervisor listens.
        watchdog_s: silence after which it takes this process for hung; 0: it does not watch.
    """

    def __init__(self, address: str = "", watchdog_s: float = 0.0) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self.watchdog_s = watchdog_s if address else 0.0
        self._socket = None if not address else socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        if self._socket is not None:
            self._socket.setblocking(False)

    @classmethod
    def of(cls, environment: MutableMapping[str, str]) -> Supervisor:
        """Read whom to tell from the environment, and take it out there."""
        address, interval, pid = (
            environment.pop(name, "") for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
        )
        if address and address[0] not in "/@":
            _log.warning(
                "NOTIFY_SOCKET=%s is no socket of this machine: no supervisor learns that this member serves", address
            )
            address = ""
        is_watched = interval.isascii() and interval.isdigit() and pid in ("", str(os.getpid()))
        return cls(address, int(interval) / 1e6 if is_watched else 0.0)

    def ready(self, status: str) -> None:
        """Tell that clients are served; ``status`` is what ``systemctl status`` shows, in one line."""
        self._insist(f"READY=1\nSTATUS={status}")

    def stopping(self, status: str) -> None:
        """Tell that the process will end by itself."""
        self._tell(f"STOPPING=1\nSTATUS={status}")

    def feed_watchdog(self, loop: asyncio.AbstractEventLoop) -> None:
        """Say now and then that the loop turns, as long as it does.

        A process that the watchdog ends (SIGABRT) leaves the stacks of its threads in its log: they say what hung.
        """
        if self.watchdog_s <= 0:
            return
        if not faulthandler.is_enabled():
            faulthandler.enable()
        self._tell("WATCHDOG=1")
        loop.call_later(self.watchdog_s / FEEDS_AN_INTERVAL, self.feed_watchdog, loop)

    def _insist(self, text: str) -> None:
        """Tell what must be heard."""
        if not self._tell(text):
            asyncio.get_running_loop().call_later(RETRY_S, self._insist, text)

    def _tell(self, text: str) -> bool:
        """Tell; False: there is no room for it now."""
        if self._socket is None:
            return True
        try:
            self._socket.sendto(text.encode(), self._address)
        except BlockingIOError:
            return False
        except OSError as error:
            _log.warning("cannot tell %r what this member does: %s", self._address, error.strerror)
        return True

    def close(self) -> None:
        """Give the socket back."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
