"""A port that forwards to a member through this process: a link that can be cut or slow.

    with Relay(endpoint, SLOW) as link:
        client = raftkv.Client(link.endpoint)

A slow link has small buffers, so the member soon finds its socket full; its bytes are forwarded in pieces, with a pause
after each. Clients' bytes are forwarded at once. Not here: one-way cuts, see `jepsen/faults/network.py`.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from tests.procs import free_port

FAST_PIECE_BYTES = 65_536
SLOW_BUFFER_BYTES = 16_384


@dataclass(frozen=True)
class Pace:
    """The size of a piece, and the pause after it."""

    piece_bytes: int = FAST_PIECE_BYTES
    pause_s: float = 0.0


FULL_SPEED = Pace()


class Relay:
    """A port that forwards to a member until connections are cut or refused.

    Arguments:
        endpoint: `host:port` of the member.
        pace: limits the speed of the member's bytes.
    """

    def __init__(self, endpoint: str, pace: Pace = FULL_SPEED) -> None:
        self.port = free_port()
        host, _, port = endpoint.rpartition(":")
        self._target = (host, int(port))
        self._pace = pace
        self._closed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    @property
    def endpoint(self) -> str:
        """`host:port` of this end."""
        return f"127.0.0.1:{self.port}"

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.socket()
            if self._pace.pause_s:
                far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER_BYTES)
                near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SLOW_BUFFER_BYTES)
            far.connect(self._target)
            for one in (near, far):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._pairs.append((near, far))
            self._start(self._copy, near, far, FULL_SPEED)
            self._start(self._copy, far, near, self._pace)

    def _copy(self, source: socket.socket, target: socket.socket, pace: Pace) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(FAST_PIECE_BYTES):
                target.sendall(data)
                passed += len(data)
                if pace.pause_s and passed >= pace.piece_bytes:
                    passed = 0
                    self._closed.wait(pace.pause_s)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Cut all connections, and refuse new ones."""
        self._closed.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in itertools.chain.from_iterable(self._pairs):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for one in itertools.chain.from_iterable(self._pairs):
            one.close()

    def __enter__(self) -> Relay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
