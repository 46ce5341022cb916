"""A node of a run that manages workers: join, start, watch and restart them, leave.

::

    code = await Supervisor(kv, participant, Settings(command=("python", "train.py"), max_restarts=3)).run()

Events that end a generation here, and their consequences:

- a worker fails: the node reports the fault, and all nodes return to the rendezvous. The fault counts against
  ``max_restarts`` only if it is the root cause among all faults reported in the generation, so workers that fail
  because another failed do not count;
- nodes joined or left: the workers are stopped (SIGTERM, later SIGKILL), and the node returns to the rendezvous;
- all workers of this node succeeded: the node waits for those of the others; the last node closes the run as a success;
- the run is closed: the workers are stopped;
- a stop signal: it is forwarded to the workers, and the node leaves; the others continue if enough are left. Further
  signals are forwarded too, as are signals such as SIGUSR1, which end nothing here.

Losing the raftkv cluster stops no worker; reports wait until the cluster is back.

Exit code: 0 after success everywhere; that of a failed worker (or 128 + its signal); 1 if others closed the run; 128 +
the number of the signal that this process got.
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
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

from raftkv.client import guard
from raftkv.client.local import free_port, start_guard
from raftkv.client.records import RecordError, read
from raftkv.client.rpc.retry import until_answered
from raftkv.errors import RaftKVError
from raftkv.loop.outcomes import outcome_of
from raftkv.training.errors import GenerationOver, RunClosed
from raftkv.training.process.environment import STYLES, Extras, Meeting, make_environment
from raftkv.training.process.faults import End, MemoryEvents, Worker, end_of
from raftkv.training.process.prefork import PREPARE_AFTER_S, Spare, of_no_generation
from raftkv.training.records import RUNNING, SUCCEEDED, Fault, Node, RunKeys
from raftkv.training.scheduling.denylist import Reported, root_cause

if TYPE_CHECKING:
    from raftkv.client.library import Client
    from raftkv.training.process.output import Output
    from raftkv.training.rendezvous.participant import Participant
    from raftkv.training.rendezvous.world import World

# -- workers --------------------------------------------------------------------------------------------------------
#
# The worker processes of one node in one generation: started together, stopped together, with nothing left behind.
#
# ::
#
#     async with Workers.started(["python", "train.py"], [environment_of_0, environment_of_1]) as workers:
#                 end = await workers.wait()           # the first that failed; None: all succeeded
#         await workers.stop(grace_s=10.0)
#
# Invariants:
#
# 1. All workers are in one process group, which a guard leads: it kills them if this process is killed (see
#    ``client.guard``). Processes of other groups are found by a mark in their environment.
# 2. When the block ends, for any reason, no worker and no process that a worker started runs any more, and their
#    output has been read (see ``output``).
#
# Not here: the consequences of an end for the run (``Supervisor``).


class WorkerStartError(RaftKVError):
    """The command cannot be started; a one-line message says why. ``code`` is the exit code that a shell would use."""

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
    spares: list[tuple[Spare, asyncio.subprocess.Process]] = field(default_factory=list)

    @classmethod
    async def prepare(
        cls, command: Sequence[str] = (), environments: Sequence[Mapping[str, str]] = (), modules: Sequence[str] = ()
    ) -> Workers:
        """Start the guard, and for each environment a spare that imports modules in advance (``prefork``).

        Raises:
            ValueError: the command is not a Python script.
            WorkerStartError: the command cannot be run.
        """
        mark, directory = secrets.token_hex(16), tempfile.mkdtemp(prefix="raftkv-run-")
        with _starting([sys.executable]):
            workers = cls(mark, directory, start_guard(directory, mark))
        try:
            await workers._until_guarded()
            for environment in environments:
                spare = Spare.plan(command, modules)
                process = await workers._run(spare.command, of_no_generation(environment), pass_fds=spare.pass_fds)
                spare.started()
                workers.spares.append((spare, process))
        except BaseException:
            await outcome_of(asyncio.create_task(workers.end()))
            raise
        return workers

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
        prepared: Workers | None = None,
    ) -> AsyncIterator[Workers]:
        """Start one worker for each environment.

        Arguments:
            command: command to run, with its arguments.
            environments: complete environment of each worker.
            ranks: ranks of the workers, for their exit messages; empty: their numbers.
            output: receives their output; None: they share this process's own streams.
            generation: generation of the workers, for the names of log files.
            prepared: result of ``prepare`` with the same command, whose spares become the workers.

        Raises:
            WorkerStartError: it cannot be run.
        """
        workers = prepared or await cls.prepare()
        workers.output, workers.generation = output, generation
        try:
            for number, environment in enumerate(environments):
                await workers._start(command, environment, ranks[number] if ranks else number, number)
            yield workers
        finally:
            await outcome_of(asyncio.create_task(workers.end()))

    @property
    def alive(self) -> int:
        """Number of workers that have not ended."""
        return sum(process.process.returncode is None for process in self.processes)

    async def wait(self) -> End | None:
        """Wait for the first failed worker; None: all succeeded."""
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
        """Ask all workers to end, and kill the remaining ones after a while.

        Arguments:
            grace_s: seconds until they are killed.
            number: signal that asks them to end.
        """
        self.send(number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await asyncio.gather(*(process.process.wait() for process in self.processes))
        await self.end()

    def send(self, number: int) -> None:
        """Send a signal to all running workers, and to their child processes in the group."""
        if self.guard.returncode is None:
            for process in self.processes:
                with contextlib.suppress(ProcessLookupError):
                    if os.getpgid(process.worker.pid) != self.guard.pid:  # of a session of its own, as by setsid
                        process.process.send_signal(number)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.guard.pid, number)

    async def _until_guarded(self) -> None:
        """Wait until the guard is ready, so that a signal to its group does not end it."""
        if self.guard.stdout is not None:
            await asyncio.to_thread(self.guard.stdout.read, 1)

    async def _start(self, command: Sequence[str], environment: Mapping[str, str], rank: int, local_rank: int) -> None:
        error_file = os.path.join(self.directory, f"error-{local_rank}.json")
        environment = {**environment, guard.MARK: self.mark, "TORCHELASTIC_ERROR_FILE": error_file}
        with _starting(command), self._streams(rank, local_rank) as (stdout, stderr):
            process = self._take_spare(local_rank, environment, stdout, stderr)
            if process is None:
                process = await self._run(command, environment, stdout=stdout, stderr=stderr)
        worker = Worker(process.pid, rank, local_rank, error_file)
        self.processes.append(_Process(worker, process, MemoryEvents.of(process.pid)))

    def _take_spare(
        self, number: int, environment: Mapping[str, str], stdout: int | None, stderr: int | None
    ) -> asyncio.subprocess.Process | None:
        """Make a spare the worker; None: no spare is running."""
        if number >= len(self.spares):
            return None
        spare, process = self.spares[number]
        outputs = [output for output in (stdout, stderr) if output is not None]
        return process if process.returncode is None and spare.hand_over(environment, outputs) else None

    async def _run(
        self, command: Sequence[str], environment: Mapping[str, str], **how: Any
    ) -> asyncio.subprocess.Process:
        with _starting(command):
            return await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                env={**environment, guard.MARK: self.mark},
                process_group=self.guard.pid,
                **how,
            )

    def _streams(self, rank: int, local_rank: int) -> AbstractContextManager[tuple[int | None, int | None]]:
        if self.output is None:
            return contextlib.nullcontext((None, None))
        return self.output.of_worker(self.generation, rank, local_rank)

    async def end(self) -> None:
        """Kill all remaining processes, and wait until their output was read. Idempotent."""
        self.send(signal.SIGKILL)
        for process in self.processes:
            await process.process.wait()
        for spare, waiting in self.spares:
            spare.close()
            await waiting.wait()
        if self.guard.returncode is None:
            await asyncio.to_thread(self.guard.communicate)
            await asyncio.to_thread(guard.kill_marked, self.mark)
            shutil.rmtree(self.directory, ignore_errors=True)
        if self.output is not None:
            await self.output.drained()


@contextlib.contextmanager
def _starting(command: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        why = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        code = 127 if isinstance(error, FileNotFoundError) else 126
        raise WorkerStartError(command[0] if command else "", why.lower(), code) from None


Result = TypeVar("Result")

PORTS_FIELD: Final = "ports"
"""Name in a node's ``data``: the ports of its TensorFlow servers."""
_OVER_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to run, and how.

    Attributes:
        command: command of each worker.
        max_restarts: number of faults of this node after which workers are restarted.
        stop_grace_s: time from SIGTERM to SIGKILL.
        stop_signals: signals that end this node.
        styles: see ``environment``.
        endpoints: endpoints passed to the workers.
        inherited: environment to which the workers' variables are added.
        output: receives the workers' output; None: they share this process's own streams.
        prefork: modules that spare workers import in advance; see ``prefork``.
        tell: called with progress messages for people.
    """

    command: tuple[str, ...]
    max_restarts: int = 0
    stop_grace_s: float = 10.0
    stop_signals: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    styles: tuple[str, ...] = STYLES
    endpoints: tuple[str, ...] = ()
    inherited: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    output: Output | None = None
    prefork: tuple[str, ...] = ()
    tell: Callable[[str], None] = lambda line: None


class _Stopped(Exception):
    """A stop signal arrived."""


class Supervisor:
    """Manages the workers of one node, generation after generation.

    Arguments:
        kv: a client of the whole cluster.
        participant: this node, registered.
        settings: see ``Settings``.
    """

    def __init__(self, kv: Client, participant: Participant, settings: Settings) -> None:
        self._kv = kv
        self._participant = participant
        self._settings = settings
        self._restarts = 0
        self._signal = 0
        self._workers: Workers | None = None
        self._preparing: asyncio.Task[Workers] | None = None
        self._wake = asyncio.Event()

    def stop(self, number: int) -> None:
        """Forward a signal to the workers and leave; further signals are only forwarded. Call on the loop."""
        if self._signal:
            self.pass_on(number)
        else:
            self._signal = number
            self._wake.set()

    def pass_on(self, number: int) -> None:
        """Forward a signal to the workers, if there are any. Call on the loop."""
        if self._workers is not None:
            self._workers.send(number)

    async def run(self) -> int:
        """Run until this node is done with the run.

        Returns:
            The exit code.

        Raises:
            TrainingError: no generation can be joined; the message says why.
            WorkerStartError: the command cannot be run.
            StatusError: the cluster refused.
        """
        unsubscribe = self._participant.on_change(lambda _: self._wake.set())
        if self._settings.prefork:
            self._prepare([self._settings.inherited] * self._participant.node.slots, 0.0)
        try:
            while True:
                world = await self._interruptible(self._participant.next_world())
                code = await self._live(world)
                if code is not None:
                    return code
        except _Stopped:
            return 128 + self._signal
        except RunClosed as closed:
            return self._closed_code(closed.reason)
        finally:
            unsubscribe()
            if (prepared := await self._prepared()) is not None:
                await prepared.end()
            await self._participant.leave()

    def _prepare(self, environments: Sequence[Mapping[str, str]], after_s: float) -> None:
        """Start spares for the next generation after a while."""

        async def prepare() -> Workers:
            await asyncio.sleep(after_s)
            return await Workers.prepare(self._settings.command, environments, self._settings.prefork)

        self._preparing = asyncio.create_task(prepare())

    async def _prepared(self) -> Workers | None:
        """Take the spares, if they have been started."""
        preparing, self._preparing = self._preparing, None
        if preparing is None:
            return None
        preparing.cancel()
        (prepared,) = await asyncio.gather(preparing, return_exceptions=True)
        return prepared if isinstance(prepared, Workers) else None  # if not, the workers' own start says why

    # ---- one generation

    async def _live(self, world: World) -> int | None:
        """Run the workers of one generation; return the exit code, or None: join the next generation."""
        try:
            meeting = await self._during(world, self._meeting(world))
            environments = await self._environments(world, meeting)
        except GenerationOver:
            return None
        self._say_world(world, meeting)
        ranks = [world.rank + number for number in range(world.member.slots)]
        command, output = self._settings.command, self._settings.output
        async with Workers.started(
            command, environments, ranks, output=output, generation=world.generation, prepared=await self._prepared()
        ) as workers:
            self._workers = workers
            if self._settings.prefork:
                self._prepare(environments, PREPARE_AFTER_S)
            try:
                end = await self._during(world, workers.wait())
                return await (self._succeed(world) if end is None else self._fail(world, end, workers))
            except GenerationOver as over:
                if workers.alive:
                    self._settings.tell(
                        f"generation {world.generation} is over{_because(over.reason)}; stopping the workers"
                    )
                await workers.stop(self._settings.stop_grace_s)
                return None
            except _Stopped:
                await workers.stop(self._settings.stop_grace_s, self._signal)
                raise
            finally:
                self._workers = None

    async def _succeed(self, world: World) -> int | None:
        """Record that all workers of this node succeeded; the last node to do so closes the run."""
        if await self._interruptible(self._participant.finish(SUCCEEDED)):
            return self._closed_code(phase.reason if (phase := self._participant.phase) is not None else "")
        self._check(world)
        self._settings.tell(f"all workers of this node are done; waiting for those of {world.node_count - 1} others")
        await self._during(world, asyncio.Event().wait())
        return None

    async def _fail(self, world: World, end: End, workers: Workers) -> int | None:
        """Report a fault, and decide whether this node continues."""
        fault = end.fault(world.generation, world.member.id, world.member.host)
        self._settings.tell(str(fault))
        await asyncio.gather(workers.stop(self._settings.stop_grace_s), self._interruptible(self._report(fault)))
        root = await self._interruptible(self._root_cause(world))
        if self._participant.closed or (root is not None and root.node != world.member.id):
            return None
        if self._restarts >= self._settings.max_restarts:
            reason = f"{fault}; no restarts left of {self._settings.max_restarts}"
            await self._interruptible(self._participant.close(reason))
            return exit_code(end)
        self._restarts += 1
        self._settings.tell(f"restart {self._restarts} of {self._settings.max_restarts}")
        return None

    async def _report(self, fault: Fault) -> None:
        """Report a fault, and wait until the generation has ended for all; by then, consequent faults are reported
        too."""
        await self._participant.report(fault)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_OVER_TIMEOUT_S):
                while not (self._participant.closed or self._participant.nodes_waiting):
                    await self._woken()

    async def _root_cause(self, world: World) -> Fault | None:
        """Return the root cause among the faults of the generation."""
        found = await until_answered(
            lambda: self._kv.range(RunKeys(world.run_id).faults(world.generation), prefix=True)
        )
        reported = []
        for item in found:
            with contextlib.suppress(RecordError):
                reported.append(Reported(read(Fault, item), item.mod_revision))
        return root_cause(reported)

    def _closed_code(self, reason: str) -> int:
        """Return the exit code for a run that others have closed."""
        if reason == SUCCEEDED:
            return 0
        self._settings.tell(f"the run was closed{_because(reason)}")
        return 1

    # ---- waiting

    async def _woken(self) -> None:
        await self._wake.wait()
        self._wake.clear()

    async def _interruptible(self, what: Coroutine[Any, Any, Result]) -> Result:
        """Wait for something, unless a signal comes."""
        return await self._unless(what, lambda: None)

    async def _during(self, world: World, what: Coroutine[Any, Any, Result]) -> Result:
        """Wait for something, but not beyond the end of the generation.

        Raises:
            GenerationOver: the generation ended first, and ``what`` was cancelled.
        """
        return await self._unless(what, lambda: self._check(world))

    async def _unless(self, what: Coroutine[Any, Any, Result], check: Callable[[], None]) -> Result:
        task = asyncio.ensure_future(what)
        try:
            while not task.done():
                if self._signal:
                    raise _Stopped
                check()
                woken = asyncio.ensure_future(self._woken())
                await asyncio.wait((task, woken), return_when=asyncio.FIRST_COMPLETED)
                woken.cancel()
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def _check(self, world: World) -> None:
        """Raise ``GenerationOver`` if the generation is known to have ended."""
        participant, state = self._participant, self._participant.phase
        if participant.closed or participant.nodes_waiting:
            over = state is not None and (state.phase != RUNNING or state.generation != world.generation)
            raise GenerationOver(world.run_id, world.generation, state.reason if over and state is not None else "")

    # ---- what workers find in their environment

    async def _meeting(self, world: World) -> Meeting:
        """Agree where the generation's workers meet: rank 0's node chooses a port and publishes it."""
        if world.index == 0:
            meeting = Meeting(world.member.address or world.member.host, free_port())
            await self._participant.publish(str(meeting))
            return meeting
        return Meeting.parse(await self._participant.published())

    async def _environments(self, world: World, meeting: Meeting) -> list[dict[str, str]]:
        settings = self._settings
        ports = await self._during(world, self._ports(world)) if "tf" in settings.styles else {}
        extras = Extras(settings.endpoints, ports, self._restarts, settings.max_restarts)
        return [
            {**settings.inherited, **make_environment(world, number, meeting, extras, settings.styles or ("none",))}
            for number in range(world.member.slots)
        ]

    async def _ports(self, world: World) -> dict[str, list[int]]:
        """Read the ports that nodes have published, by node id."""
        page = await until_answered(lambda: self._kv.range(RunKeys(world.run_id).nodes, prefix=True))
        found = {}
        for item in page:
            with contextlib.suppress(RecordError, ValueError):
                node = read(Node, item)
                found[node.id] = [int(text) for text in node.data.get(PORTS_FIELD, "").split(",") if text]
        return found

    def _say_world(self, world: World, meeting: Meeting) -> None:
        first, last = world.rank, world.rank + world.member.slots - 1
        mine = f"rank {first}" if first == last else f"ranks {first} to {last}"
        nodes = f"{world.node_count} node{'s' if world.node_count > 1 else ''}"
        self._settings.tell(
            f"generation {world.generation}: {mine} of {world.world_size}, {nodes}, meeting at {meeting}"
        )


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""


def exit_code(end: End) -> int:
    """Return the exit code that a shell would use for a worker.

    >>> from raftkv.training.process.faults import Worker
    >>> exit_code(End(Worker(1), 7)), exit_code(End(Worker(1), -1, "SIGKILL"))
    (7, 137)
    """
    if not end.signal:
        return end.exit_code
    number = getattr(signal, end.signal, None)
    return 128 + int(number) if number is not None else 1
