"""Our own standard output and error, written by a thread each: handing lines over never takes long.

Invariants:

1. ``write`` never waits for whoever reads our output. What they have not taken waits in memory
   (``MEMORY_MAX_BYTES``), then in a temporary file without a name (``FILE_MAX_BYTES``); more than that is dropped, and
   a line says how much.
2. Bytes come out in the order in which they were handed over; those of one ``write`` together.
3. A reader that is gone costs its output and nothing else.
"""

from __future__ import annotations

import os
import select
import tempfile
import threading
from collections import deque
from typing import Final

MEMORY_MAX_BYTES: Final = 1024 * 1024
FILE_MAX_BYTES: Final = 1024 * 1024 * 1024
PATIENCE_S: Final = 5.0
"""How long ``close`` waits for a reader that takes nothing at all."""
_CHUNK_BYTES: Final = 64 * 1024


class Backlog:
    """Bytes in order, in memory and then in a file; for one thread at a time."""

    def __init__(self, memory_max_bytes: int = MEMORY_MAX_BYTES, file_max_bytes: int = FILE_MAX_BYTES) -> None:
        self._memory: deque[bytes] = deque()
        self._memory_bytes = 0
        self._memory_max_bytes, self._file_max_bytes = memory_max_bytes, file_max_bytes
        self._file: int | None = None
        self._read = self._written = 0
        self.dropped_bytes = 0

    def __len__(self) -> int:
        return self._memory_bytes + self._written - self._read

    def put(self, data: bytes) -> None:
        """Add to the end; what there is no room for is counted in ``dropped_bytes``."""
        if self._written == self._read and self._memory_bytes + len(data) <= self._memory_max_bytes:
            self._memory.append(data)
            self._memory_bytes += len(data)
            return
        try:
            self._put_in_file(data)
        except OSError:  # no room on the disk either
            self.dropped_bytes += len(data)

    def _put_in_file(self, data: bytes) -> None:
        if self._written + len(data) > self._file_max_bytes:
            self.dropped_bytes += len(data)
            return
        if self._file is None:
            self._file, path = tempfile.mkstemp(prefix="raftkv-output-")
            os.unlink(path)
        view = memoryview(data)
        at = self._written
        while view:
            count = os.pwrite(self._file, view, at)
            at, view = at + count, view[count:]
        self._written = at

    def take(self) -> bytes:
        """Remove from the front; nothing if it is empty."""
        if self._memory:
            data = self._memory.popleft()
            self._memory_bytes -= len(data)
            return data
        if self._file is None or self._read == self._written:
            return b""
        data = os.pread(self._file, min(_CHUNK_BYTES, self._written - self._read), self._read)
        self._read += len(data)
        if self._read == self._written:
            os.ftruncate(self._file, 0)
            self._read = self._written = 0
        return data

    def clear(self) -> None:
        """Forget everything."""
        self._memory.clear()
        self._memory_bytes = self._read = self._written = 0
        if self._file is not None:
            os.close(self._file)
            self._file = None


class Writer:
    """One of our own streams.

    Arguments:
        descriptor: it; stays open.
        backlog: what waits for the reader.
    """

    def __init__(self, descriptor: int, backlog: Backlog | None = None) -> None:
        self._descriptor = descriptor
        self._backlog = Backlog() if backlog is None else backlog
        self._changed = threading.Condition()
        self._closing = self._gone = False
        self._moved = 0
        self._thread = threading.Thread(target=self._run, name=f"output-{descriptor}", daemon=True)
        self._thread.start()

    def write(self, data: bytes) -> None:
        """Hand whole lines over; never waits for the reader."""
        with self._changed:
            if not self._gone:
                if len(self._backlog) + len(data) < MEMORY_MAX_BYTES:
                    self._tell_dropped()
                self._backlog.put(data)
                self._changed.notify_all()

    def _tell_dropped(self) -> None:
        dropped = self._backlog.dropped_bytes
        if dropped:
            self._backlog.dropped_bytes = 0
            self._backlog.put(b"raftkvctl: %d bytes of output were not taken in time and are left out\n" % dropped)

    def close(self, patience_s: float = PATIENCE_S) -> None:
        """Wait until all is written, the reader is gone, or it has taken nothing for a while."""
        with self._changed:
            self._closing = True
            self._tell_dropped()
            self._changed.notify_all()
        moved = -1
        while self._thread.is_alive() and moved != self._moved:
            moved = self._moved
            self._thread.join(patience_s)

    def _run(self) -> None:
        while data := self._next():
            try:
                self._write_all(data)
            except OSError:  # nobody reads any more, or the disk is full: only this output is lost
                with self._changed:
                    self._gone = True
                    self._backlog.clear()
                return

    def _next(self) -> bytes:
        with self._changed:
            while not (data := self._backlog.take()) and not self._closing:
                self._changed.wait()
            return data

    def _write_all(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                count = os.write(self._descriptor, view[:_CHUNK_BYTES])
            except BlockingIOError:  # whoever started us has made it so
                select.select((), (self._descriptor,), ())
                continue
            view = view[count:]
            self._moved += count


class Console:
    """Both streams, and the lines that we say ourselves."""

    def __init__(self, output: int = 1, errors: int = 2) -> None:
        self.output = Writer(output)
        # Both may lead to one place (`2>&1`, a terminal): then one thread writes both, and no line gets into another.
        self.errors = self.output if os.path.sameopenfile(output, errors) else Writer(errors)

    def tell(self, text: str) -> None:
        """Say a line to people, on standard error."""
        self.errors.write(f"raftkvctl: {text}\n".encode(errors="backslashreplace"))

    def close(self) -> None:
        """Implement ``Writer.close``."""
        for writer in {self.output, self.errors}:
            writer.close()
