"""The queue between the producers of lines and the thread that writes them, for the log and the audit log.

    put -> queue -> thread -> output

Each counter has one writer, so no lock is needed. When too much waits, because the disk is full or slow, new lines are
dropped, and a line in their place says how many are missing. An output that fails keeps the lines it has taken, and is
tried again.

``ThreadedHandler`` waits until a line of the log is written, for ``WAIT_S`` per second at most, and not at all if the
output is already behind. So a line is on its way to the disk before the member continues, and a blocked output costs
one such wait.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from abc import abstractmethod
from collections import deque
from time import monotonic
from typing import Final, Generic, TypeVar

from raftkv.server.logs.files import Output

WAIT_S: Final = 0.02
"""Longest wait for lines to be written, summed over ``WINDOW_S``: the loop must not be held for 0.05 s."""

WINDOW_S: Final = 1.0

LAST_WAIT_S: Final = 0.2
"""The same for the last line of a member (fatal), after which it stops."""

WAITING_BYTES_MAX: Final = 4 * 1024 * 1024
"""Memory of waiting lines above which new ones are dropped."""

RETRY_S: Final = 1.0
"""Time between attempts to write to an output that fails."""

CLOSE_S: Final = 2.0
"""Longest wait, when the log is closed, for an output that takes no lines."""

BATCH: Final = 500
"""Most lines in one write."""

R = TypeVar("R")


class LineThread(Generic[R]):
    """Turns records into lines and writes them, on its own thread.

    Arguments:
        output: takes lines.
        name: name of the thread.
        waiting_bytes_max: memory of waiting records above which new ones are dropped.
        gather_s: how long lines are collected for one write.

    Attributes:
        dropped: number of records dropped because the queue was full.
        written: number of lines written.
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
        """Records dropped since the last one that found room."""
        self._begun = self._begun_bytes = 0
        """Lines and bytes that the output has taken but not written yet."""
        self._told = ""
        """The last reported trouble of the output."""
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @abstractmethod
    def _gap_record(self, missing: int) -> R:
        """Return the record that stands for ``missing`` dropped ones."""

    @abstractmethod
    def _line(self, record: R) -> bytes:
        """Return the line of a record; called on the thread."""

    @abstractmethod
    def _tell(self, trouble: str) -> None:
        """Report why lines go on into a file that should have been followed by another; called on the thread."""

    def _failed(self, error: OSError) -> None:
        """Note that the output has failed, or failed again."""

    def _progressed(self) -> None:
        """Note that lines were written."""

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait to be written."""
        return self._put_bytes - self._taken_bytes

    def put(self, record: R, size_bytes: int) -> bool:
        """Queue a record; False: it was dropped, since too much waits. Only one caller at a time is allowed.

        Arguments:
            record: record to write.
            size_bytes: memory of the record until it is written.
        """
        if self.waiting_bytes + size_bytes > self._waiting_bytes_max:
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
        """Write the waiting lines, and end the thread. Returns the number of lines that could not be written."""
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
        """Write some lines; False: the output fails, and keeps the lines it has taken.

        Raises:
            MemoryError: the output has taken nothing, and the queue keeps the lines.
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
        if self._output.trouble != self._told:
            self._told = self._output.trouble
            if self._told:
                self._tell(self._told)
        return True


class ThreadedHandler(LineThread[bytes], logging.Handler):
    """Writes log records to an output, on its own thread.

    Arguments:
        output: takes lines.
    """

    def __init__(self, output: Output) -> None:
        logging.Handler.__init__(self)
        self._is_behind = False
        self._waited_s = self._window_at = 0.0
        """Seconds waited since the current window began, and the time of its begin."""
        self._progress = threading.Condition()
        LineThread.__init__(self, output, "raftkv-log", WAITING_BYTES_MAX)

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record. ``Handler.handle`` holds its lock, so there is one caller at a time."""
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
        return self._own_line("the log lacks %d lines here: they could not be written", missing)

    def _own_line(self, text: str, value: int | str) -> bytes:
        record = logging.makeLogRecord(
            {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING", "msg": text, "args": (value,)}
        )
        return f"{self.format(record)}\n".encode("utf-8", "backslashreplace")

    def _tell(self, trouble: str) -> None:
        # Not through the queue, which has one producer. What is not written now waits in the output.
        with contextlib.suppress(OSError):
            self._output.write(self._own_line("the log goes on in this file, which cannot be rotated: %s", trouble))

    def _line(self, record: bytes) -> bytes:
        return record

    def _failed(self, error: OSError) -> None:
        # There is no place to report it. Readers of the log see the gap, and the member continues.
        self._is_behind = True

    def _progressed(self) -> None:
        with self._progress:
            self._is_behind = False
            self._progress.notify_all()

    def _allowed_s(self) -> float:
        """Return how long callers may still wait in this window: a slow output must not hold the loop."""
        now = monotonic()
        if now - self._window_at > WINDOW_S:
            self._window_at, self._waited_s = now, 0.0
        return max(WAIT_S - self._waited_s, 0.0)

    def _wait(self, timeout_s: float) -> None:
        """Wait until all queued lines are written. After a timeout, callers do not wait until that has happened."""
        if timeout_s <= 0:
            return
        put, began = self._put, monotonic()
        with self._progress:
            if not self._progress.wait_for(lambda: self.written >= put, timeout_s):
                self._is_behind = True
        self._waited_s += monotonic() - began

    def flush(self) -> None:
        """Wait a moment for the queued lines."""
        if not self._closing.is_set() and self._thread.is_alive():
            self._wait(WAIT_S)

    def close(self) -> None:
        """Write the waiting lines, and end the thread."""
        if not self._closing.is_set():
            self._end(CLOSE_S)
        super().close()
