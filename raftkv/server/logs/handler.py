"""The queue between those who have lines and the thread that writes them: of the log and of the audit log.

    put -> queue -> thread -> output

Each counter has one writer, so there is no lock. When too much waits, because the disk is full or slow, new lines are
dropped, and a line in their place says how many are missing. An output that fails keeps what it has taken, and is tried
again.

``ThreadedHandler`` waits until a line of the log is written, ``WAIT_S`` a second at most, unless the output is behind
already. So a line is on its way to the disk before the member goes on, and an output that stands still costs one such
wait.
"""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections import deque
from time import monotonic
from typing import Final, Generic, TypeVar

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

BATCH: Final = 500
"""Lines of one write."""

R = TypeVar("R")


class LineThread(Generic[R]):
    """Has records made into lines and written, by a thread of its own.

    Arguments:
        output: takes lines.
        name: of the thread.
        waiting_bytes_max: what records may take before new ones are dropped.
        gather_s: how long lines are gathered for one write.

    Attributes:
        dropped: records that found the queue full.
        written: lines that were written.
    """

    def __init__(self, output: Output, name: str, waiting_bytes_max: int, gather_s: float = 0.0) -> None:
        self.dropped = 0
        self.written = 0
        self._output = output
        self._waiting_bytes_max = waiting_bytes_max
        self._gather_s = gather_s
        self._records: deque[tuple[R, int]] = deque()
        self._put = self._put_bytes = self._taken_bytes = 0
        self._gap = 0
        """Records dropped since one found room."""
        self._begun = self._begun_bytes = 0
        """Lines and bytes that the output has taken and not yet written."""
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @abstractmethod
    def _gap_record(self, missing: int) -> R:
        """Return the record that stands for so many which were dropped."""

    @abstractmethod
    def _line(self, record: R) -> bytes:
        """Make a line, on the thread."""

    def _failed(self, error: OSError) -> None:
        """The output has failed, or failed again."""

    def _progressed(self) -> None:
        """Lines were written."""

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait to be written."""
        return self._put_bytes - self._taken_bytes

    def put(self, record: R, size_bytes: int) -> bool:
        """Have a record written; False: it was dropped, since too much waits. There is one caller at a time.

        Arguments:
            record: to be made a line.
            size_bytes: that it takes until then.
        """
        if self._put_bytes - self._taken_bytes + size_bytes > self._waiting_bytes_max:
            self.dropped += 1
            self._gap += 1
            return False
        if self._gap:
            self._name_gap()
        self._queue(record, size_bytes)
        return True

    def _name_gap(self) -> None:
        missing, self._gap = self._gap, 0
        self._queue(self._gap_record(missing), 0)

    def _queue(self, record: R, size_bytes: int) -> None:
        self._put_bytes += size_bytes
        self._put += 1
        self._records.append((record, size_bytes))
        if not self._wake.is_set():
            self._wake.set()

    def _end(self, timeout_s: float) -> int:
        """Write what waits, and end the thread; returns how many lines could not be written."""
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout_s)
        lost = len(self._records) + self._begun
        if not self._thread.is_alive():
            self._output.close()
        return lost

    # -- on the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        is_last = False
        while not is_last:
            self._wake.wait()
            self._closing.wait(self._gather_s)
            self._wake.clear()
            is_last = self._closing.is_set()
            is_open = True
            try:
                while is_open and (self._begun or self._records):
                    is_open = self._write_batch()
            except MemoryError:
                is_open = False  # for now: the lines are in the queue, or in the output
            if not is_open and not is_last:
                self._closing.wait(RETRY_S)
                self._wake.set()

    def _write_batch(self) -> bool:
        """Write some lines; False: the output fails, and keeps what it has taken.

        Raises:
            MemoryError: the output has taken nothing, and the queue keeps it.
        """
        records = [] if self._begun else [self._records[at] for at in range(min(BATCH, len(self._records)))]
        begun_bytes = sum(size_bytes for _, size_bytes in records)
        lines = b"".join([self._line(record) for record, _ in records])
        error: OSError | None = None
        try:
            self._output.write(lines)
        except OSError as failure:
            error = failure
        for _ in records:
            self._records.popleft()
        self._begun, self._begun_bytes = self._begun + len(records), self._begun_bytes + begun_bytes
        if error is not None:
            self._failed(error)
            return False
        self.written += self._begun
        self._taken_bytes += self._begun_bytes
        self._begun = self._begun_bytes = 0
        self._progressed()
        return True


class ThreadedHandler(LineThread[bytes], logging.Handler):
    """Writes records of the log to an output, on a thread of its own.

    Arguments:
        output: takes lines.
    """

    def __init__(self, output: Output) -> None:
        logging.Handler.__init__(self)
        self._is_behind = False
        self._waited_s = self._window_at = 0.0
        """Seconds waited since the window began, and its begin."""
        self._progress = threading.Condition()
        LineThread.__init__(self, output, "raftkv-log", WAITING_BYTES_MAX)

    def emit(self, record: logging.LogRecord) -> None:
        """Have a record written. ``Handler.handle`` holds its lock, so there is one caller at a time."""
        try:
            line = f"{self.format(record)}\n".encode("utf-8", "backslashreplace")
        except Exception:
            self.handleError(record)
            return
        if self._closing.is_set() or not self.put(line, len(line)):
            return
        if record.levelno >= logging.INFO and not self._is_behind:
            self._wait(LAST_WAIT_S if record.levelno >= logging.CRITICAL else self._allowed_s())

    def _gap_record(self, missing: int) -> bytes:
        record = logging.makeLogRecord(
            {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING"}
            | {"msg": "the log lacks %d lines here: they could not be written", "args": (missing,)}
        )
        return f"{self.format(record)}\n".encode()

    def _line(self, record: bytes) -> bytes:
        return record

    def _failed(self, error: OSError) -> None:
        # Where should it be said? Readers of the log see the gap; the member goes on.
        self._is_behind = True

    def _progressed(self) -> None:
        with self._progress:
            self._is_behind = False
            self._progress.notify_all()

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
            if not self._progress.wait_for(lambda: self.written >= put, timeout_s):
                self._is_behind = True
        self._waited_s += monotonic() - began

    def flush(self) -> None:
        """Wait for what was put, for a moment."""
        if not self._closing.is_set() and self._thread.is_alive():
            self._wait(WAIT_S)

    def close(self) -> None:
        """Write what waits, and end the thread."""
        if not self._closing.is_set():
            self._end(CLOSE_S)
        super().close()
