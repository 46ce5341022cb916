"""The queue between the callers of a logger and the thread that writes.

    emit -> queue -> thread -> output
      waits until the line is written, ``WAIT_S`` a second at most, unless the output is behind already

So a line is on its way to the disk before the member goes on, and an output that stands still costs one such wait.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from time import monotonic
from typing import Final

from raftkv.server.logs.files import Output

WAIT_S: Final = 0.02
"""Longest wait, of all lines of ``WINDOW_S`` together, for their writing: the loop may not be held for 0.05 s."""

WINDOW_S: Final = 1.0

LAST_WAIT_S: Final = 0.2
"""The same for the last words of a member (fatal), after which it stops."""

WAITING_BYTES_MAX: Final = 4 * 1024 * 1024
"""Memory that lines may take before new ones are dropped."""

RETRY_S: Final = 1.0
"""Time between attempts to write to an output that fails."""

CLOSE_S: Final = 2.0
"""Longest wait, at a stop, for an output that takes no lines."""


class ThreadedHandler(logging.Handler):
    """Writes records to an output, on a thread of its own.

    Arguments:
        output: takes lines.

    Attributes:
        dropped: lines that found the queue full.
    """

    def __init__(self, output: Output) -> None:
        super().__init__()
        self.dropped = 0
        self._output = output
        self._lines: deque[bytes] = deque()
        self._put_bytes = self._taken_bytes = 0
        self._put = self._written = 0
        self._begun = self._begun_bytes = 0
        """Lines and bytes that the output has taken and not yet written."""
        self._gap = 0
        """Lines dropped since one found room."""
        self._is_behind = False
        self._waited_s = self._window_at = 0.0
        """Seconds waited since the window began, and its begin."""
        self._is_closing = False
        self._wake = threading.Event()
        self._progress = threading.Condition()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="raftkv-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Have a record written."""
        try:
            line = f"{self.format(record)}\n".encode("utf-8", "backslashreplace")
        except Exception:
            self.handleError(record)
            return
        if self._is_closing or not self._add(line):
            return
        if record.levelno >= logging.INFO and not self._is_behind:
            self._wait(LAST_WAIT_S if record.levelno >= logging.CRITICAL else self._allowed_s())

    def _add(self, line: bytes) -> bool:
        """Queue a line; False: too many wait. ``Handler.handle`` holds its lock, so there is one caller at a time."""
        if self._put_bytes - self._taken_bytes + len(line) > WAITING_BYTES_MAX:
            self.dropped += 1
            self._gap += 1
            return False
        if self._gap:
            missing, self._gap = self._gap, 0
            record = logging.makeLogRecord(
                {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING"}
                | {"msg": "the log lacks %d lines here: they could not be written", "args": (missing,)}
            )
            self._queue(f"{self.format(record)}\n".encode())
        self._queue(line)
        return True

    def _queue(self, line: bytes) -> None:
        self._put_bytes += len(line)
        self._put += 1
        self._lines.append(line)
        self._wake.set()

    def _allowed_s(self) -> float:
        """Return how long callers may still wait in this window: a slow output must not hold the loop either."""
        now = monotonic()
        if now - self._window_at > WINDOW_S:
            self._window_at, self._waited_s = now, 0.0
        return max(WAIT_S - self._waited_s, 0.0)

    def _wait(self, timeout_s: float) -> None:
        """Wait until all queued lines are written; after a timeout no caller waits until they are."""
        if timeout_s <= 0:
            return
        put, began = self._put, monotonic()
        with self._progress:
            if not self._progress.wait_for(lambda: self._written >= put, timeout_s):
                self._is_behind = True
        self._waited_s += monotonic() - began

    def flush(self) -> None:
        """Wait for what was put, for a moment."""
        if not self._is_closing and self._thread.is_alive():
            self._wait(WAIT_S)

    def close(self) -> None:
        """Write what waits, and end the thread."""
        if not self._is_closing:
            self._is_closing = True
            self._closing.set()
            self._wake.set()
            self._thread.join(CLOSE_S)
            if not self._thread.is_alive():
                self._output.close()
        super().close()

    # -- on the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            is_last = self._closing.is_set()
            has_written = self._write_all()
            if is_last:
                return
            if not has_written:
                self._closing.wait(RETRY_S)
                self._wake.set()

    def _write_all(self) -> bool:
        """Write all that waits; False: the output fails, and keeps what it has taken."""
        while True:
            taken = [self._lines.popleft() for _ in range(len(self._lines))]
            self._begun += len(taken)
            self._begun_bytes += sum(map(len, taken))
            try:
                self._output.write(b"".join(taken))
            except OSError:
                # Where should it be said? Readers of the log see the gap; the member goes on.
                self._is_behind = True
                return False
            self._taken_bytes += self._begun_bytes
            with self._progress:
                self._written += self._begun
                self._begun = self._begun_bytes = 0
                self._is_behind = False
                self._progress.notify_all()
            if not self._lines:
                return True
