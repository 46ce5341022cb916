"""One simulated run: generations of ranks and all programs around them, faults by seed, then calm.

simulation = Simulation(draw(17))
outcome = simulation.play()
outcome.violation                  # None, or which property did not hold, and when
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from raftkv.checkpoint.errors import StorageError
from raftkv.checkpoint.records import CopyRecord
from raftkv.checkpoint.retention import collector, ownership
from raftkv.checkpoint.retention.policy import Policy
from raftkv.client.operations import Put
from tests.virtual_loop import Scheduler
from tests.virtual_store.cluster import Cluster
from tests.virtual_store.network import Weather

from . import programs
from .checker import ROUND, Checker, Which
from .disk import Disk, SimPlace
from .process import Process
from .programs import Generation

CALM = Weather()
LOOK_S = 0.25
SETTLE_S = 120.0
WATCHERS = 2
EVALUATORS = ("eval/a", "eval/b")
PROCESSES_MAX = 60


@dataclass(frozen=True, slots=True)
class Settings:
    """What one seed stands for.

    Attributes:
        copies: share of the txns of which a copy arrives up to half a minute later.
        write_s, train_s, collect_s: longest time of a piece of a file, between saves, between collections.
        faults: names; see ``Simulation``. One happens every ``gap_s`` on average for ``faults_s``.
        is_memory: it is a run of ``sim.memory``.
    """

    seed: int
    weather: Weather = field(default_factory=Weather)
    copies: float = 0.0
    write_s: float = 0.1
    train_s: float = 0.5
    collect_s: float = 2.0
    collectors: int = 1
    readers: int = 1
    failure: float = 0.0
    faults: tuple[str, ...] = ()
    gap_s: float = 1.0
    faults_s: float = 10.0
    is_memory: bool = False


@dataclass(slots=True)
class Outcome:
    """What came of it."""

    settings: Settings
    violation: str | None
    generations: int
    commits: int
    begun: int
    fenced_writes: int
    deleted: int
    virtual_s: float
    faults: Counter[str]
    log: list[str]

    @property
    def replay_command(self) -> str:
        """How to see it again."""
        module = "tests.checkpoint.sim.memory" if self.settings.is_memory else "tests.checkpoint.sim"
        return f"python -m {module} --seed {self.settings.seed} --trace"


class Simulation:
    """Processes, a cluster, a disk and a checker, on one virtual clock. Faults are the methods that return a bool."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.random = random.Random(settings.seed)
        self.scheduler = Scheduler(random.Random(self.random.random()))
        self.cluster = Cluster(self.scheduler, random.Random(self.random.random()))
        self.checker = Checker(self.cluster.store)
        self.disk = self.checker.disk = Disk(self.checker, random.Random(self.random.random()))
        self.disk.failure = settings.failure
        self.processes: list[Process] = []
        self.generations: list[Generation] = []
        self.told: list[list[tuple[int, Which]]] = [[] for _ in range(WATCHERS)]
        self.happened: Counter[str] = Counter()
        self.crews: dict[str, tuple[programs.Program, str]] = {}
        self.is_calm = False
        self.is_over = False

    # ---- processes

    def say(self, text: str) -> None:
        self.checker.now = self.scheduler.now
        self.checker.say(text)

    def _start(self, name: str, program: programs.Program, run_id: str = "job") -> Process:
        return Process(self, f"{name}#{len(self.processes)}", run_id).start(program)

    def begin_generation(self) -> None:
        """The members of the run change: another number of ranks, and the fence of the old ones is over."""
        number = len(self.generations) + 1
        self.cluster.store.txn((), [Put(ROUND, str(number))])
        generation = self.make_generation(number, self.cluster.store.revision, self.random.choice((1, 2, 2, 3, 4)))
        self.generations.append(generation)
        self.say(f"generation {number} of {generation.size} ranks")
        for rank in range(generation.size):
            generation.processes.append(self._start(f"g{number}r{rank}", self.program_of(generation, rank)))

    def is_broken(self, generation: Generation) -> bool:
        """Whether another one begins."""
        return not any(process.alive and not process.loop.frozen for process in generation.processes)

    def make_generation(self, number: int, revision: int, size: int) -> Generation:
        return Generation(number, revision, size)

    def program_of(self, generation: Generation, rank: int) -> programs.Program:
        return programs.rank_of(generation, rank)

    def _crew(self) -> None:
        """All programs that work beside the ranks."""
        for number in range(self.settings.collectors):
            self.crews[f"collector{number}"] = (programs.collect, "job")
        for number in range(self.settings.readers):
            self.crews[f"reader{number}"] = (programs.read, "job")
        for number, told in enumerate(self.told):
            self.crews[f"watcher{number}"] = (programs.watch(told), "job")
        for name in EVALUATORS:
            self.crews[name] = (programs.evaluate(name), "job")

    def _look(self) -> None:
        """Who is gone is started again: ranks as another generation, other programs as they were."""
        if self.is_over:
            return
        if self.is_broken(self.generations[-1]):
            self.begin_generation()
        for name, (program, run_id) in self.crews.items():
            if not any(process.alive for process in self.processes if process.name.startswith(f"{name}#")):
                self._start(name, program, run_id)
        self.scheduler.after(LOOK_S, self._look)

    @property
    def live(self) -> list[Process]:
        """Processes that are there."""
        return [process for process in self.processes if process.alive]

    async def lend(self, process: Process, copy: CopyRecord, size_bytes: int) -> memoryview:
        """Implement ``ReadCopy`` for a process."""
        raise StorageError("nothing is lent here")

    # ---- time

    @property
    def violation(self) -> str | None:
        """The first, if any."""
        for text in self.scheduler.failures:
            self.checker.violations.append(f"P0: an unhandled exception: {text}")
        self.scheduler.failures.clear()
        return self.checker.violations[0] if self.checker.violations else None

    def pass_time(self, duration_s: float) -> None:
        """Let time pass until a property is violated."""
        self.scheduler.run_until(
            self.scheduler.now + duration_s, lambda: bool(self.checker.violations or self.scheduler.failures)
        )

    def play(self) -> Outcome:
        """All of it."""
        with self.scheduler.ambient(), self._bytes():
            self.begin_generation()
            self._crew()
            self._look()
            self.scheduler.after(self.random.random(), self._strike)
            self.pass_time(self.settings.faults_s)
            self._settle()
            outcome = Outcome(
                self.settings, self.violation, len(self.generations), len(self.checker.commits),
                len(self.checker.begun), self.checker.fenced, len(self.checker.committed) - len(self.checker.live),
                self.scheduler.now, self.happened, self.checker.log,
            )  # fmt: skip
            self.scheduler.tear_down()
        return outcome

    @contextmanager
    def _bytes(self) -> Iterator[None]:
        """While it lasts, the production code's places are on this disk."""
        users = (collector, ownership)
        before = [user.Place for user in users]
        SimPlace.disk = self.disk
        for user in users:
            user.Place = SimPlace  # type: ignore[misc, assignment]
        try:
            yield
        finally:
            for user, place in zip(users, before, strict=True):
                user.Place = place  # type: ignore[misc]

    def _settle(self) -> None:
        """Heal everything; then another generation must save, and nothing of the dead may be left."""
        self.is_calm = True
        self.disk.failure = 0.0
        self.cluster.outage(0.0)
        for process in self.live:
            process.link.weather = CALM
            process.loop.crash_after(-1)  # one that was to crash at its next steps does not any more
            self._mend(process)
            self._thaw(process)
        self.pass_time(LATE_S if self.settings.copies else 1.0)
        before = len(self.checker.commits)
        self.begin_generation()
        deadline = self.scheduler.now + SETTLE_S
        while self.violation is None and len(self.checker.commits) < before + 3 and self.scheduler.now < deadline:
            self.pass_time(1.0)
        if self.violation is None and len(self.checker.commits) < before + 3:
            self.checker.fail("P9", f"nothing is saved for {SETTLE_S:g} s in calm weather")
        self._end()

    def _end(self) -> None:
        """All ranks are gone; the next generation decides what they have left, and collects."""
        self.is_over = True
        for process in self.live:
            if not process.name.startswith("watcher"):
                process.kill()
        self.pass_time(8.0)  # pins end with their leases
        for run_id in ("job", "child"):
            self._start("janitor", janitor, run_id)
            self.pass_time(8.0)
        if self.violation is None:
            self.checker.check_end(self.told, bool(self.happened["compact"]))

    # ---- faults

    def _strike(self) -> None:
        if self.is_calm or not self.settings.faults:
            return
        name = self.random.choice(self.settings.faults)
        if len(self.processes) < PROCESSES_MAX and getattr(self, name)():
            self.happened[name] += 1
        pause_s = self.random.choice(
            (0.0, self.random.uniform(0.0, 0.3), self.random.expovariate(1 / self.settings.gap_s))
        )
        self.scheduler.after(pause_s, self._strike)

    def _any(self, names: str = "") -> Process | None:
        found = [each for each in self.live if each.name.startswith(names) and not each.loop.frozen]
        return self.random.choice(found) if found else None

    def kill(self) -> bool:
        """A process is killed where it is."""
        process = self._any(self.random.choice(("", "g", "g")))
        if process is not None:
            process.kill()
        return process is not None

    def crash(self) -> bool:
        """A process crashes in a few steps, between any two awaits."""
        process = self._any(self.random.choice(("", "g", "g", "collector")))
        if process is not None:
            process.loop.crash_after(self.random.randrange(40))
        return process is not None

    def freeze(self) -> bool:
        """A process stands still for a while."""
        process = self._any(self.random.choice(("", "g", "g", "collector")))
        if process is not None:
            process.say("freezes")
            process.loop.freeze()
            self.scheduler.after(self.random.choice((0.3, 3.0, 15.0)) * self.random.random(), self._thaw, process)
        return process is not None

    def _thaw(self, process: Process) -> None:
        if process.alive and process.loop.frozen:
            process.say("thaws")
            process.loop.thaw()

    def cut(self) -> bool:
        """A process cannot reach the cluster."""
        process = self._any()
        if process is not None:
            process.say("is cut off")
            process.link.cut = True
            process.link.breaks += 1
            self.scheduler.after(self.random.choice((0.3, 6.0)) * self.random.random(), self._mend, process)
        return process is not None

    def _mend(self, process: Process) -> None:
        process.link.cut = False

    def reset(self) -> bool:
        """A connection breaks and is made again."""
        process = self._any()
        if process is not None and not process.link.cut:
            process.link.reset()
        return process is not None

    def outage(self) -> bool:
        """No rank can reach the cluster."""
        return self._trouble("outage", 3.0)

    def election(self) -> bool:
        """No member leads for a while."""
        return self._trouble("election", 1.5)

    def _trouble(self, kind: str, most_s: float) -> bool:
        if self.cluster.leads:
            self.say(kind)
            getattr(self.cluster, kind)(self.random.uniform(0.05, most_s))
        return True

    def compact(self) -> bool:
        """The cluster forgets its history."""
        self.say("compaction")
        self.cluster.store.compact()
        return True

    def regenerate(self) -> bool:
        """A new generation begins beside the old one, which does not know."""
        self.begin_generation()
        return True

    def intrude(self) -> bool:
        """A second claimant."""
        self._start("intruder", programs.intrude)
        return True

    def descend(self) -> bool:
        """A checkpoint of another run."""
        self._start("child", programs.descend, "child")
        return True


LATE_S = 14.0
FAULTS = (
    "kill", "crash", "freeze", "cut", "reset", "outage", "election", "compact", "regenerate", "intrude", "descend",
)  # fmt: skip


async def janitor(process: Process) -> None:
    """Decide and collect what all of them have left."""
    process.claim = await process.registry.claim()
    await programs._resume(process)
    for _ in range(2):
        found = await process.registry.collect(Policy())
        if found.failures:
            process.simulation.checker.fail("P9", f"not deleted: {found.failures}")
