"""The worker processes of one node in one generation: started together, ended together, nothing of them left behind.

::

    async with Workers.started(["python", "train.py"], [environment_of_0, environment_of_1]) as workers:
        end = await workers.wait()           # the first that did not end well; None: all did
        await workers.stop(grace_s=10.0)

Invariants:

1. All workers are in one process group, which a guard leads: it kills them if this process is killed (see
   ``process.guard``). What a worker starts in other groups is found by a mark in its environment.
2. When the block ends, however it ends, no worker and nothing that a worker started runs any more, and what they
   printed has been read (see ``output``).

Leaves out: what an end means for the run (``supervisor``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from raftkv.errors import RaftKVError
from raftkv.training.process import guard
from raftkv.training.process.faults import End, MemoryEvents, Worker, end_of

if TYPE_CHECKING:
    from raftkv.training.process.output import Output

_GUARD: Final = str(Path(guard.__file__).resolve())


class WorkerStartError(RaftKVError):
    """The command cannot be started; one line says why. ``code`` is what a shell would return."""

    def __init__(self, command: str, why: str, code: int) -> None:
        super().__init__(f"cannot start {command!r}: {why}")
        self.code = code


@dataclass
class _Process:
    worker: Worker
    process: asyncio.subprocess.Process
    memory: MemoryEvents

    async def wait(self) -> End:
        code = await self.process.wait()
        killed = code == -signal.SIGKILL and self.memory.again().grew_since(self.memory)
        kind = os.CLD_EXITED if code >= 0 else os.CLD_KILLED
        status = os.waitid_result((self.worker.pid, os.getuid(), signal.SIGCHLD, abs(code), kind))
        return end_of(status, self.worker, out_of_memory=killed)


@dataclass
class Workers:
    """The worker processes of one node in one generation; made by ``started``."""

    mark: str
    directory: str
    guard: subprocess.Popen[bytes]
    output: Output | None = None
    generation: int = 0
    processes: list[_Process] = field(default_factory=list)

    @classmethod
    @asynccontextmanager
    async def started(
        cls,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        ranks: Sequence[int] = (),
        *,
        output: Output | None = None,
        generation: int = 0,
    ) -> AsyncIterator[Workers]:
        """Start one worker for each environment.

        Arguments:
            command: what to run, with its arguments.
            environments: all of the environment of each worker.
            ranks: of the workers, for their ends; empty: their numbers.
            output: takes what they print; None: they share this process's own streams.
            generation: whose workers they are, for the names of log files.

        Raises:
            WorkerStartError: it cannot be run.
        """
        mark, directory = secrets.token_hex(16), tempfile.mkdtemp(prefix="raftkv-run-")
        workers = cls(mark, directory, _start_guard(mark, directory), output, generation)
        try:
            await workers._until_guarded()
            for number, environment in enumerate(environments):
                await workers._start(command, environment, ranks[number] if ranks else number, number)
            yield workers
        finally:
            await asyncio.shield(workers._end())

    @property
    def alive(self) -> int:
        """Workers that have not ended."""
        return sum(process.process.returncode is None for process in self.processes)

    async def wait(self) -> End | None:
        """Wait for the first end that is a fault; None: all have ended well."""
        waiting = [asyncio.create_task(process.wait()) for process in self.processes]
        try:
            for coming in asyncio.as_completed(waiting):
                end = await coming
                if end.is_fault:
                    return end
            return None
        finally:
            for task in waiting:
                task.cancel()

    async def stop(self, grace_s: float, number: int = signal.SIGTERM) -> None:
        """Ask all to end, and kill those that have not after a while.

        Arguments:
            grace_s: seconds that they have to end.
            number: of the signal that asks them.
        """
        self.send(number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await asyncio.gather(*(process.process.wait() for process in self.processes))
        await self._end()

    def send(self, number: int) -> None:
        """Send a signal to all that have not ended, and to what they started in their group."""
        if self.guard.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.guard.pid, number)

    async def _until_guarded(self) -> None:
        """Wait until the guard can be relied on: a signal to its group must not end it."""
        if self.guard.stdout is not None:
            await asyncio.to_thread(self.guard.stdout.read, 1)

    async def _start(self, command: Sequence[str], environment: Mapping[str, str], rank: int, local_rank: int) -> None:
        error_file = os.path.join(self.directory, f"error-{local_rank}.json")
        marks = {guard.MARK: self.mark, "TORCHELASTIC_ERROR_FILE": error_file}
        try:
            with self._streams(rank, local_rank) as (stdout, stderr):
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    env={**environment, **marks},
                    process_group=self.guard.pid,
                )
        except (OSError, ValueError) as error:
            raise _start_error(command, error) from None
        worker = Worker(process.pid, rank, local_rank, error_file)
        self.processes.append(_Process(worker, process, MemoryEvents.of(process.pid)))

    def _streams(self, rank: int, local_rank: int) -> AbstractContextManager[tuple[int | None, int | None]]:
        if self.output is None:
            return contextlib.nullcontext((None, None))
        return self.output.of_worker(self.generation, rank, local_rank)

    async def _end(self) -> None:
        """Leave nothing, and nothing unsaid; harmless when repeated."""
        self.send(signal.SIGKILL)
        for process in self.processes:
            await process.process.wait()
        if self.guard.returncode is None:
            await asyncio.to_thread(self.guard.communicate)
            await asyncio.to_thread(guard.kill_marked, self.mark)
            shutil.rmtree(self.directory, ignore_errors=True)
        if self.output is not None:
            await self.output.drained()


def _start_guard(mark: str, directory: str) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", _GUARD, mark, directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            process_group=0,
        )
    except OSError as error:
        raise _start_error([sys.executable], error) from None


def _start_error(command: Sequence[str], error: OSError | ValueError) -> WorkerStartError:
    why = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
    code = 127 if isinstance(error, FileNotFoundError) else 126
    return WorkerStartError(command[0] if command else "", why.lower(), code)
