"""Our own standard output and error, each written by a thread, so that ``write`` never blocks.

Invariants:

1. ``write`` never waits for the reader of our output. Unread bytes are buffered in memory (``MEMORY_MAX_BYTES``),
   then in an unnamed temporary file (``FILE_MAX_BYTES``); the rest is dropped, and a line says how much.
2. Bytes are written in the order of the calls; the bytes of one ``write`` stay together.
3. If the reader is gone, only its output is lost.
4. A lack of memory costs output and closes no pipe: a worker that writes to a closed pipe dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import re
import select
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from raftkv.errors import ConfigError

MEMORY_MAX_BYTES: Final = 1024 * 1024
FILE_MAX_BYTES: Final = 1024 * 1024 * 1024
PATIENCE_S: Final = 5.0
"""How long ``close`` waits for a reader that reads nothing."""
STARVED_S: Final = 0.1
"""How long a thread pauses after a lack of memory before it tries again."""
_CHUNK_BYTES: Final = 64 * 1024


class Backlog:
    """Bytes in order, in memory and then in a file; not thread-safe."""

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
        """Append bytes; those without room are counted in ``dropped_bytes``."""
        try:
            if self._written == self._read and self._memory_bytes + len(data) <= self._memory_max_bytes:
                self._memory.append(data)
                self._memory_bytes += len(data)
            else:
                self._put_in_file(data)
        except (OSError, MemoryError):  # no room on the disk either
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
        """Remove and return bytes from the front; empty if there are none."""
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
        """Drop all bytes."""
        self._memory.clear()
        self._memory_bytes = self._read = self._written = 0
        if self._file is not None:
            os.close(self._file)
            self._file = None


class Writer:
    """One of our own streams.

    Arguments:
        descriptor: descriptor of the stream; stays open.
        backlog: output that waits for the reader.
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
        """Queue whole lines; never waits for the reader."""
        with self._changed:
            if not self._gone:
                if len(self._backlog) + len(data) < MEMORY_MAX_BYTES:
                    self._tell_dropped()
                self._backlog.put(data)
                self._changed.notify_all()

    def leave_out(self, size_bytes: int) -> None:
        """Count bytes that were lost before they came here."""
        with self._changed:
            self._backlog.dropped_bytes += size_bytes

    def _tell_dropped(self) -> None:
        dropped = self._backlog.dropped_bytes
        if dropped:
            self._backlog.dropped_bytes = 0
            self._backlog.put(b"raftkvctl: %d bytes of output were not taken in time and are left out\n" % dropped)

    def close(self, patience_s: float = PATIENCE_S) -> None:
        """Wait until everything is written, the reader is gone, or it has read nothing for a while."""
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
            except OSError:  # the reader is gone, or the disk is full; only this output is lost
                with self._changed:
                    self._gone = True
                    self._backlog.clear()
                return

    def _next(self) -> bytes:
        with self._changed:
            while True:
                try:
                    if (data := self._backlog.take()) or self._closing:
                        return data
                    self._changed.wait()
                except MemoryError:
                    self._changed.wait(STARVED_S)

    def _write_all(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            try:
                count = os.write(self._descriptor, memoryview(data)[at : at + _CHUNK_BYTES])
            except BlockingIOError:  # the parent has made the descriptor non-blocking
                select.select((), (self._descriptor,), ())
                continue
            except MemoryError:
                select.select((), (), (), STARVED_S)
                continue
            at += count
            self._moved += count


class Console:
    """Both streams, and raftkv's own messages."""

    def __init__(self, output: int = 1, errors: int = 2) -> None:
        self.output = Writer(output)
        # Both may lead to the same place (`2>&1`, a terminal): then one thread writes both, so that lines do not mix.
        self.errors = self.output if os.path.sameopenfile(output, errors) else Writer(errors)

    def tell(self, text: str) -> None:
        """Print a message to standard error."""
        self.errors.write(f"raftkvctl: {text}\n".encode(errors="backslashreplace"))

    def close(self) -> None:
        """Implement ``Writer.close``."""
        for writer in {self.output, self.errors}:
            writer.close()


# -- lines ----------------------------------------------------------------------------------------------------------
#
# Splitting pieces of bytes into lines. Pure.

LINE_MAX_BYTES: Final = 64 * 1024
"""A longer line is passed on in parts, to limit memory."""

_END: Final = re.compile(rb"(\r\n|\r|\n)")


class Lines:
    """Splits the bytes of one stream into lines.

    >>> lines = Lines()
    >>> lines.feed(b"one\\ntw"), lines.feed(b"o\\r\\n"), lines.rest()
    ([b'one'], [b'two'], [])
    >>> lines.feed(b"\\r 10%\\r 20%"), lines.rest()          # a progress bar: each of its states is a line
    ([b' 10%'], [b' 20%'])
    """

    def __init__(self) -> None:
        self._rest = b""
        self._returned = False

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that these bytes complete, without line ends."""
        if self._returned and data[:1] == b"\n":
            data = data[1:]  # the second half of a \r\n whose line was already returned
        if data:
            self._returned = False
        *pairs, self._rest = _END.split(self._rest + data)
        found = []
        for text, end in zip(pairs[::2], pairs[1::2], strict=True):
            if text or end != b"\r":  # a progress bar begins with \r, with nothing before it
                found.append(text)
        if pairs and not self._rest and pairs[-1] == b"\r":
            self._returned = bool(pairs[-2])
            self._rest = b"" if self._returned else b"\r"  # an empty line if \n follows, nothing otherwise
        while len(self._rest) > LINE_MAX_BYTES:
            found.append(self._rest[:LINE_MAX_BYTES])
            self._rest = self._rest[LINE_MAX_BYTES:]
        return found

    def rest(self) -> list[bytes]:
        """Return the rest at the end of the stream: a line without line end, or nothing."""
        rest, self._rest = self._rest.rstrip(b"\r"), b""
        return [rest] if rest else []


# -- destinations ---------------------------------------------------------------------------------------------------
#
# Which streams of which workers go to a file, to the console, or to both, in torchrun's terms.
#
# The files are ``<log-dir>/<run>_<random>/epoch_<generation>/<local rank>/stdout.log`` and ``stderr.log``, in a new
# folder for every start of ``run exec``, so that no file is overwritten.

_ALL: Final = re.compile(r"[0-3]")
_EACH: Final = re.compile(r"\d+:[0-3](,\d+:[0-3])*")


class Streams(enum.IntFlag):
    """Streams of a worker."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


Choice = Callable[[int], Streams]
"""The chosen streams, by local rank."""


def parse_streams(text: str) -> Choice:
    """Parse ``2``, or ``0:3,1:2`` for single local ranks.

    >>> parse_streams("1")(0), parse_streams("0:3,2:1")(2), parse_streams("0:3,2:1")(1)
    (<Streams.OUT: 1>, <Streams.OUT: 1>, <Streams.NONE: 0>)

    Raises:
        ConfigError: the text has another form.
    """
    if _ALL.fullmatch(text):
        every = Streams(int(text))
        return lambda local_rank: every
    if not _EACH.fullmatch(text):
        raise ConfigError(f"is 0, 1 (stdout), 2 (stderr), 3 (both) or LOCAL_RANK:NUMBER,..., not {text!r}")
    pairs = (pair.split(":") for pair in text.split(","))
    chosen = {int(local_rank): Streams(int(streams)) for local_rank, streams in pairs}
    return lambda local_rank: chosen.get(local_rank, Streams.NONE)


def parse_ranks(text: str) -> frozenset[int] | None:
    """Parse ``0,2``; an empty text gives None: all.

    Raises:
        ConfigError: the text has other parts than numbers.
    """
    if not text:
        return None
    words = text.split(",")
    if not all(word.isdecimal() for word in words):
        raise ConfigError(f"is a list of numbers, as in 0,1, not {text!r}")
    return frozenset(int(word) for word in words)


def _none(local_rank: int) -> Streams:
    return Streams.NONE


@dataclass(frozen=True, slots=True)
class Destinations:
    """Destinations of output.

    Attributes:
        directory: directory of the log files; None: no log files.
        redirects: streams that go only to a file.
        tee: streams that go to a file and to the console.
        shown: local ranks whose output is on the console; None: all.
        prefixed: whether lines on the console begin with the rank.
    """

    directory: Path | None = None
    redirects: Choice = _none
    tee: Choice = _none
    shown: frozenset[int] | None = None
    prefixed: bool = True

    def file(self, generation: int, local_rank: int, stream: Streams) -> Path | None:
        """Return the log file of a stream; creates its folder.

        Arguments:
            generation: generation of the worker.
            local_rank: rank on its node.
            stream: ``stdout`` or ``stderr``.

        Raises:
            OSError: the folder cannot be created.
        """
        if self.directory is None or not stream & (self.redirects(local_rank) | self.tee(local_rank)):
            return None
        folder = self.directory / f"epoch_{generation}" / str(local_rank)
        folder.mkdir(parents=True, exist_ok=True)
        return folder / ("stdout.log" if stream is Streams.OUT else "stderr.log")

    def is_shown(self, local_rank: int, stream: Streams) -> bool:
        """Return whether a stream goes to the console.

        Arguments:
            local_rank: rank of the worker on its node.
            stream: stream.
        """
        only_in_file = stream & self.redirects(local_rank) and not stream & self.tee(local_rank)
        return not only_in_file and (self.shown is None or local_rank in self.shown)


def make_directory(base: str, run_id: str) -> Path:
    """Create a folder for the logs of a run, below ``base`` or, if that is empty, in the temporary directory.

    Arguments:
        base: folder that the user named; empty: none.
        run_id: run id, part of the folder's name.

    Raises:
        OSError: the folder cannot be created.
    """
    if base:
        Path(base).mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{run_id.replace('/', '_')}_", dir=base or None)).resolve()


# -- pump -----------------------------------------------------------------------------------------------------------
#
# Reads the output of workers from their pipes: one thread per stream, until all processes that hold the other end have
# ended.
#
# ::
#
#     output = Output(console, Destinations())
#     with output.of_worker(generation=1, rank=3, local_rank=1) as (stdout, stderr):
#         process = await asyncio.create_subprocess_exec(..., stdout=stdout, stderr=stderr)
#     ...                                      # the worker and all that it has started have ended
#     await output.drained()

READ_BYTES: Final = 64 * 1024
PIPE_PATIENCE_S: Final = 5.0
"""How long a pipe may stay open and silent after the workers have ended, if a process that was not found holds it."""
PIPE_PATIENCES_MAX: Final = 4
"""Maximum number of these intervals if such a process keeps printing; the workers' own output is read at once."""


class Output:
    """The output of all workers of a node.

    Arguments:
        console: where output is printed.
        destinations: streams to print, and streams to keep in files.
    """

    def __init__(self, console: Console, destinations: Destinations) -> None:
        self._console, self._destinations = console, destinations
        self._pumps: list[_Pump] = []

    @contextlib.contextmanager
    def of_worker(self, generation: int, rank: int, local_rank: int) -> Iterator[tuple[int, int]]:
        """Yield descriptors for a worker's stdout and stderr; start the worker inside the block.

        Arguments:
            generation: generation of the worker.
            rank: rank in the generation.
            local_rank: rank on its node.

        Raises:
            OSError: a log file or a pipe cannot be created.
        """
        with contextlib.ExitStack() as ours:
            ends = []
            for stream, writer in ((Streams.OUT, self._console.output), (Streams.ERR, self._console.errors)):
                path = self._destinations.file(generation, local_rank, stream)
                shown = writer if self._destinations.is_shown(local_rank, stream) else None
                reading, writing = os.pipe()
                ours.callback(os.close, writing)
                ends.append(writing)
                prefix = b"[rank%d]: " % rank if self._destinations.prefixed else b""
                pump = _Pump(reading, prefix, shown, path, self._console)
                self._pumps.append(pump)
                pump.start()
            yield ends[0], ends[1]

    async def drained(self) -> None:
        """Wait until all output of the workers, which must have ended, was read."""
        pumps, self._pumps = self._pumps, []
        await asyncio.gather(*(asyncio.to_thread(pump.wait) for pump in pumps))


class _Pump(threading.Thread):
    """One stream of one worker."""

    def __init__(self, source: int, prefix: bytes, shown: Writer | None, path: Path | None, console: Console) -> None:
        super().__init__(name=f"pump-{source}", daemon=True)
        self._source, self._prefix, self._shown, self._path, self._console = source, prefix, shown, path, console
        self._lines = Lines()
        try:
            self._log = path.open("ab", buffering=0) if path is not None else None
        except OSError:
            os.close(source)
            raise
        self._moved = 0

    def run(self) -> None:
        """Read until the end."""
        try:
            while self._pass_on():
                pass
        finally:
            os.close(self._source)
            if self._log is not None:
                self._log.close()

    def _pass_on(self) -> bool:
        """Read and pass on what the pipe holds; False: the pipe has ended. What memory does not hold is left out."""
        data = None
        try:
            data = os.read(self._source, READ_BYTES)
            self._moved += len(data)
            self._keep(data)
            self._show(self._lines.feed(data) if data else self._lines.rest())
        except MemoryError:
            self._console.errors.leave_out(len(data or b""))
            if not data:
                select.select((), (), (), STARVED_S)
            return True
        return bool(data)

    def wait(self) -> None:
        """Wait for the end while output arrives, but not for ever, because a process that is not a worker may hold the
        pipe."""
        moved = -1
        for _ in range(PIPE_PATIENCES_MAX):
            if not self.is_alive() or moved == self._moved:
                return
            moved = self._moved
            self.join(PIPE_PATIENCE_S)

    def _keep(self, data: bytes) -> None:
        view = memoryview(data)
        while self._log is not None and view:
            try:
                view = view[self._log.write(view) :]
            except OSError as error:
                self._console.tell(f"cannot write {self._path}: {(error.strerror or str(error)).lower()}")
                self._log.close()
                self._log = None

    def _show(self, lines: list[bytes]) -> None:
        if self._shown is not None and lines:
            self._shown.write(b"".join([b"%b%b\n" % (self._prefix, line) for line in lines]))
