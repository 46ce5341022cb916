"""The queue between the loop and the thread that writes the lines, and the file that they go to.

The loop appends records and counts their bytes; the thread takes them out, makes lines and writes them, a batch every
0.05 s while there are any. Each counter has one writer, so there is no lock.

When more than ``WAITING_BYTES_MAX`` wait, because the disk is full or slow, new records are dropped: the member goes
on, the metric counts them, and a line in their place says how many are missing.

Lines go to standard output or error, or to a file that is rotated by its size. A file that was moved or deleted is
opened anew before the next lines (so ``logrotate`` needs no signal). Only their owner may read these files.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from raftkv.server.audit.lines import Record, line, text_of
from raftkv.server.logs.files import LineFile, LineStream, Output

FILE_MODE: Final = 0o600


class AuditFile(LineFile):
    """A file of lines, and those that it was before: ``FILE.1`` is the youngest.

    Arguments:
        path: of the file.
        max_bytes: size above which it is rotated; 0: never.
        keep: rotated files that stay.

    Raises:
        ConfigError: it cannot be opened; one line for the user.
    """

    def __init__(self, path: str, max_bytes: int = 0, keep: int = 10) -> None:
        self._max_bytes = max_bytes
        self._keep = keep
        super().__init__(path, "the audit log", FILE_MODE)

    def make_room(self, size_bytes: int) -> None:
        """Rotate the file if it gets too large."""
        if self._max_bytes and self.size_bytes and self.size_bytes + size_bytes > self._max_bytes:
            self._rotate()

    def _rotate(self) -> None:
        for number in range(self._keep - 1, 0, -1):
            older, younger = self._rotated(number + 1), self._rotated(number)
            if younger.exists():
                os.replace(younger, older)
        if self._keep:
            os.replace(self.path, self._rotated(1))
        else:
            os.unlink(self.path)
        self.reopen()

    def _rotated(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")


def open_destination(name: str, max_bytes: int, keep: int) -> Output:
    """Return where a flag says that lines go.

    Arguments:
        name: ``-`` for standard output, ``stderr``, or a file.
        max_bytes, keep: see ``AuditFile``.

    Raises:
        ConfigError: the file cannot be opened.
    """
    if name in ("-", "stderr"):
        return LineStream(1 if name == "-" else 2)
    return AuditFile(name, max_bytes, keep)


_log = logging.getLogger(__name__)

WAITING_BYTES_MAX: Final = 16 * 1024 * 1024
"""Memory that records may take before new ones are dropped."""

RECORD_BYTES: Final = 400
"""Memory of a record beside its request and its certificate."""

GATHER_S: Final = 0.05
"""How long lines are gathered for one write: what a killed member loses."""

RETRY_S: Final = 1.0
"""Time between attempts to write to a destination that fails."""

BATCH: Final = 500
"""Records made into lines for one write."""

CLOSE_S: Final = 5.0
"""Longest wait, at a stop, for a destination that takes no lines."""


class AuditTrail(Collector):
    """Takes records on the loop and has them written by a thread.

    Arguments:
        destination: takes lines.
        member: name of the member.
        waiting_bytes_max: see ``WAITING_BYTES_MAX``.

    Attributes:
        dropped: records that found the queue full.
        written: lines that were written.
    """

    def __init__(self, destination: Output, member: str, waiting_bytes_max: int = WAITING_BYTES_MAX) -> None:
        self.dropped = 0
        self.written = 0
        self._destination = destination
        self._member = member
        self._waiting_bytes_max = waiting_bytes_max
        self._records: deque[tuple[Record, int]] = deque()
        self._put_bytes = 0
        self._taken_bytes = 0
        self._gap = 0
        """Records dropped since one found room."""
        self._begun_bytes = 0
        self._begun_lines = 0
        """Lines and bytes that the output has taken and not yet written."""
        self._failing = False
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="audit", daemon=True)
        self._thread.start()

    # -- on the loop -------------------------------------------------------------------------------------------------

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait to be written."""
        return self._put_bytes - self._taken_bytes

    def add(self, record: Record) -> None:
        """Have a record written, or drop it if too much waits.

        Arguments:
            record: of one event.
        """
        request = record.request
        size = RECORD_BYTES + len(request or b"") + len(record.certificate)
        if self._put_bytes - self._taken_bytes + size > self._waiting_bytes_max:
            self.dropped += 1
            self._gap += 1
            return
        if self._gap:
            self._say_what_is_missing()
        self._put_bytes += size
        self._records.append((record, size))
        if not self._wake.is_set():
            self._wake.set()

    def _say_what_is_missing(self) -> None:
        lines, self._gap = self._gap, 0
        self._records.append((Record(time.time(), "dropped", request=text_of({"lines": lines})), 0))

    def close(self) -> None:
        """Write what waits, and end the thread; to be called off the loop, once, when nothing more is added."""
        if self._gap:
            self._say_what_is_missing()
        self._closing.set()
        self._wake.set()
        self._thread.join(CLOSE_S)
        lost = len(self._records) + self._begun_lines
        if lost:
            _log.error("the last %d lines of the audit log could not be written", lost)
        if not self._thread.is_alive():
            self._destination.close()

    def collect(self) -> Iterator[Metric]:
        """Lines written and dropped, and what waits."""
        written, dropped = float(self.written), float(self.dropped)
        yield CounterMetricFamily("raftkv_audit_lines", "Lines written to the audit log.", written)
        yield CounterMetricFamily("raftkv_audit_dropped_lines", "Lines that the audit log lacks.", dropped)
        waiting = float(self.waiting_bytes)
        yield GaugeMetricFamily("raftkv_audit_waiting_bytes", "What waits to be written to the audit log.", waiting)

    # -- on the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        closing = False
        while not closing:
            self._wake.wait()
            closing = self._closing.wait(GATHER_S)
            self._wake.clear()
            while (self._begun_lines or self._records) and self._write_batch():
                pass
            if self._failing and not closing:
                self._closing.wait(RETRY_S)
                self._wake.set()

    def _write_batch(self) -> bool:
        """Write some records; False: the destination failed, and keeps what it has taken."""
        lines: list[bytes] = []
        if not self._begun_lines:
            while self._records and len(lines) < BATCH:
                record, size = self._records.popleft()
                lines.append(self._line(record))
                self._begun_bytes += size
            self._begun_lines = len(lines)
        try:
            self._destination.write(b"".join(lines))
        except OSError as error:
            if not self._failing:
                self._failing = True
                _log.error(
                    "cannot write the audit log: %s; lines wait, up to %d MiB of them, then they are dropped",
                    error.strerror or error,
                    self._waiting_bytes_max >> 20,
                )
            return False
        if self._failing:
            self._failing = False
            _log.warning("the audit log is written again; it lacks %d lines", self.dropped)
        self.written += self._begun_lines
        self._taken_bytes += self._begun_bytes
        self._begun_lines = self._begun_bytes = 0
        return True

    def _line(self, record: Record) -> bytes:
        try:
            return line(record, self._member)
        except Exception:
            _log.exception("a line of the audit log cannot be made: %s %s", record.event, record.method)
            return b""
