"""The queue of the audit log, and its file.

The loop queues records. A thread (``logs.handler``) turns them into lines and writes these, a batch every 0.05 s while
there are any. When more than ``WAITING_BYTES_MAX`` wait, new records are dropped and counted in a metric; the member
continues.

Lines go to standard output or error, or to a file that is rotated like the log (``logs.files``). A file that was moved
or deleted is reopened before the next lines (so ``logrotate`` needs no signal). Only their owner may read these files.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from raftkv.config import LogRotation
from raftkv.server.audit.lines import Record, line, text_of
from raftkv.server.logs.files import LineFile, LineStream, Output, RotatedFile
from raftkv.server.logs.handler import LineThread

SUBJECT: Final = "the audit log"
FILE_MODE: Final = 0o600


def open_destination(name: str, max_bytes: int, keep: int) -> Output:
    """Return the output for the value of a flag.

    Arguments:
        name: ``-`` for standard output, ``stderr``, or a file.
        max_bytes: size above which the file is rotated; 0: never.
        keep: number of rotated files to keep; 0: all.

    Raises:
        ConfigError: the file cannot be opened.
    """
    if name in ("-", "stderr"):
        return LineStream(1 if name == "-" else 2)
    if not max_bytes:
        return LineFile(name, SUBJECT, FILE_MODE)
    return RotatedFile(name, LogRotation(maxbackups=keep), SUBJECT, FILE_MODE, max_bytes)


_log = logging.getLogger(__name__)

WAITING_BYTES_MAX: Final = 16 * 1024 * 1024
"""Memory of waiting records above which new ones are dropped."""

RECORD_BYTES: Final = 400
"""Memory of a record beyond its request and its certificate."""

GATHER_S: Final = 0.05
"""How long lines are collected for one write; a killed member loses these."""

CLOSE_S: Final = 5.0
"""Longest wait, at a stop, for a destination that takes no lines."""


class AuditTrail(LineThread[Record], Collector):
    """Takes records on the loop; a thread writes them.

    Arguments:
        destination: takes lines.
        member: name of the member.
        waiting_bytes_max: as ``WAITING_BYTES_MAX``.
    """

    def __init__(self, destination: Output, member: str, waiting_bytes_max: int = WAITING_BYTES_MAX) -> None:
        self._member = member
        self._is_failing = False
        super().__init__(destination, "audit", waiting_bytes_max, GATHER_S)

    def add(self, record: Record) -> None:
        """Queue a record, or drop it if too much waits.

        Arguments:
            record: record of one event.
        """
        self.put(record, RECORD_BYTES + len(record.request or b"") + len(record.certificate))

    def close(self) -> None:
        """Write the waiting lines, and end the thread. Call it once, off the loop, when no more records are added."""
        if self._gap:
            self._name_gap()
        if lost := self._end(CLOSE_S):
            _log.error("stopped with %d lines of the audit log unwritten: they are lost", lost)

    def collect(self) -> Iterator[Metric]:
        """Yield the number of dropped lines."""
        yield CounterMetricFamily("raftkv_audit_dropped_lines", "Lines that the audit log lacks.", float(self.dropped))

    def _gap_record(self, missing: int) -> Record:
        return Record(time.time(), "dropped", request=text_of({"lines": missing}))

    def _line(self, record: Record) -> bytes:
        try:
            return line(record, self._member)
        except MemoryError:
            raise
        except Exception:
            _log.exception("cannot encode an audit record, it is lost: %s %s", record.event, record.method)
            return b""

    def _tell(self, trouble: str) -> None:
        _log.error("the audit log goes on in its old file, which cannot be rotated: %s", trouble)

    def _failed(self, error: OSError) -> None:
        if not self._is_failing:
            self._is_failing = True
            _log.error(
                "cannot write the audit log: %s; up to %d MiB of lines are kept in memory, further lines are dropped",
                error.strerror or error,
                self._waiting_bytes_max >> 20,
            )

    def _progressed(self) -> None:
        if self._is_failing:
            self._is_failing = False
            _log.warning("the audit log can be written again; %d lines were lost", self.dropped)
