"""Takes what workers print out of their pipes: a thread for each stream, until all that hold its other end are gone.

::

    output = Output(console, Destinations())
    with output.of_worker(generation=1, rank=3, local_rank=1) as (stdout, stderr):
        process = await asyncio.create_subprocess_exec(..., stdout=stdout, stderr=stderr)
    ...                                      # the worker and all that it has started have ended
    await output.drained()
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from raftkv.training.process.output.console import Console, Writer
from raftkv.training.process.output.destinations import Destinations, Streams
from raftkv.training.process.output.lines import Lines

READ_BYTES: Final = 64 * 1024
PATIENCE_S: Final = 5.0
"""How long a pipe may stay open and silent after the workers are gone: a process that was not to be found holds it."""


class Output:
    """The output of all workers of a node.

    Arguments:
        console: where it is shown.
        destinations: what is shown, and what is kept in files.
    """

    def __init__(self, console: Console, destinations: Destinations) -> None:
        self._console, self._destinations = console, destinations
        self._pumps: list[_Pump] = []

    @contextlib.contextmanager
    def of_worker(self, generation: int, rank: int, local_rank: int) -> Iterator[tuple[int, int]]:
        """Descriptors for a worker's stdout and stderr; the block is to start it.

        Arguments:
            generation: of the worker.
            rank: in the generation.
            local_rank: on its node.

        Raises:
            OSError: a log file or a pipe cannot be made.
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
        """Wait until everything that the workers have printed was read; they must have ended."""
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
            while data := os.read(self._source, READ_BYTES):
                self._moved += len(data)
                self._keep(data)
                self._show(self._lines.feed(data))
            self._show(self._lines.rest())
        finally:
            os.close(self._source)
            if self._log is not None:
                self._log.close()

    def wait(self) -> None:
        """Wait for the end, as long as anything comes."""
        moved = -1
        while self.is_alive() and moved != self._moved:
            moved = self._moved
            self.join(PATIENCE_S)

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
