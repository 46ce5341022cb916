"""One fault in the middle of a save, what the next generation makes of it, and all that must hold.

The fault strikes when its victim, or the coordinator, stands at the point. Then a new generation of other processes
claims the run, takes over, loads ``latest``, and saves the next step: the same number that the victim was saving, if
that was given up. Those of the old generation that live, thaw or were let go are zombies by then; each tries all that
its claim once allowed.

What must hold, in every trial: ``latest`` loads and every digest matches; it is what the keys said at the moment of the
claim (the attempt, if all its ranks had prepared, else the checkpoint before), so it never goes back; what a rank was
told is committed stays; nothing is left undecided; no directory is without a key; zombies are refused, and the
checkpoints are as they were after they have tried.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import raftkv
from bench.stage import leader_of
from raftkv.checkpoint import Registry
from raftkv.checkpoint.retention.policy import Policy
from tests.checkpoint.chaos.points import (
    BEFORE_WRITE,
    COORDINATOR_POINTS,
    DONE,
    FAILED,
    MID_WRITE,
    State,
    read_state,
    strays,
)
from tests.checkpoint.chaos.processes import REGISTRY, Generation, Pool, Rank, Stuck
from tests.checkpoint.chaos.registry_ranks import problems_of
from tests.procs import data_directory

RANK = "rank"
COORDINATOR = "coordinator"
LEADER = "raft-leader"
LEADER_AND_COORDINATOR = "raft-leader+coordinator"
FREEZE = "freeze-coordinator"
WITH_LEADER = (LEADER, LEADER_AND_COORDINATOR)
COLLECTED = 0.2
"""Share of the trials in which garbage is collected while a zombie sleeps."""
KEPT = 3
"""Checkpoints that the collector leaves in the end."""
STRIDE = 10
"""Steps of training between two checkpoints."""
REFUSED = ("FenceBroken", "GenerationOver")
"""How a zombie's write must end."""
ENDED = (*REFUSED, "AttemptOver", "StaleStep", "CheckpointExists", "FileNotFoundError", "StorageError")
"""How a save may end that another generation overtook; the last two: its directory was collected."""
BROKEN_GROUP = ("RuntimeError", "DistBackendError", "DistNetworkError", "CheckpointException")
"""And how with torch, if a rank of its group is gone."""


class Cell(NamedTuple):
    """What is killed where, and how often."""

    kill: str
    point: str
    trials: int


@dataclass
class Tally:
    """What the trials of one point and victim have shown.

    Attributes:
        trials: that were run.
        new_step, previous_step: how often the step that was being saved was resumed from, and the one before.
        zombie_writes: writes that zombies tried; all must be refused.
        problems: what did not hold, with the trial.
    """

    kill_at: str
    kill: str
    trials: int = 0
    new_step: int = 0
    previous_step: int = 0
    zombie_writes: int = 0
    problems: list[str] = field(default_factory=list)


class Leaders:
    """Kills the member that leads, and starts it again."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._down: Any = None

    def kill(self) -> None:
        """Kill the leader, once all members are there."""
        self.heal()
        self._down = leader_of(self._cluster)
        self._down.kill()

    def heal(self) -> None:
        """Wait until the member that was killed serves again."""
        if self._down is not None:
            self._down.restart()
            self._down = None


class Scene:
    """One run of training and its checkpoints, through many trials.

    Arguments:
        pool: where ranks come from.
        kv: a client of the cluster.
        leaders: who kills its leader.
        run_id: of the run.
        directory: of its checkpoints.
        size: ranks of a generation.
    """

    def __init__(self, pool: Pool, kv: Any, leaders: Leaders, run_id: str, directory: Path, size: int) -> None:
        self._pool = pool
        self._kv = kv
        self._leaders = leaders
        self._run_id = run_id
        self._directory = directory
        self._size = size
        self._registry = Registry(kv, run_id, uri=str(directory))
        self._ranks: list[Rank] = []
        self._latest = 0
        self._is_collected = False
        self._meetings = itertools.count()
        directory.mkdir(parents=True)
        self._commits = Registry(kv, run_id).watch(start_revision=1)

    def begin(self) -> None:
        """Have a first generation, and one checkpoint."""
        self._ranks = self._new_generation()
        self._save_undisturbed(self._ranks)

    def trial(self, point: str, kill: str, chooser: random.Random, tally: Tally) -> None:
        """Do one trial; see the module."""
        tally.trials += 1
        wrong: list[str] = []
        try:
            self._trial(point, kill, chooser, tally, wrong)
        finally:
            tally.problems += [f"trial {tally.trials}: {text}" for text in wrong]

    def _trial(self, point: str, kill: str, chooser: random.Random, tally: Tally, wrong: list[str]) -> None:
        step = self._latest + STRIDE
        old, frozen = self._strike(point, kill, step, chooser)
        if kill == LEADER:
            self._check_saved(old, step, wrong)
        new = self._new_generation(without_takeover=True)
        at_claim = read_state(self._kv, self._run_id)
        new[0].call("take_over")
        found = self._check_resumed(new, at_claim, wrong)
        tally.new_step += found == step
        tally.previous_step += found == step - STRIDE
        if found not in (step, step - STRIDE):
            wrong.append(f"resumed from step {found}, which is neither {step} nor {step - STRIDE}")
        self._latest = found
        self._save_undisturbed(new)
        if chooser.random() < COLLECTED:
            self._registry.collect()  # takes the directory away in which a zombie is about to write
            self._is_collected = True
        if frozen is not None:
            frozen.thaw()
        old.until_ended()
        self._check_told(old, found, step, wrong)
        if kill == FREEZE and found != step:
            self._check_unfinished(step, point, wrong)
        tally.zombie_writes += self._check_zombies(old, wrong)
        self._check_after(wrong)
        self._pool.give_back(old.ranks)
        self._ranks = new

    def _strike(self, point: str, kill: str, step: int, chooser: random.Random) -> tuple[Generation, Rank | None]:
        """Save, and have the fault at the point; returns the generation, and the rank that is frozen."""
        old = Generation(self._ranks)
        victim = chooser.randrange(1, self._size) if kill == RANK else 0
        stopped = 0 if point in COORDINATOR_POINTS else victim
        if kill == LEADER and point not in COORDINATOR_POINTS:
            stopped = chooser.randrange(self._size)
        old.start("save", lambda rank: (step, rank, self._size, point if rank == stopped else ""))
        stops = old.ranks[stopped]
        old.until_at(stops)
        if kill in WITH_LEADER:
            self._leaders.kill()
        if kill == FREEZE:
            stops.freeze()
        elif kill != LEADER:
            old.ranks[victim].kill()
        if not stops.is_dead:
            stops.go_on()
        return old, stops if kill == FREEZE else None

    def _new_generation(self, *, without_takeover: bool = False) -> list[Rank]:
        ranks = self._pool.take(self._size)
        generation = Generation(ranks)
        generation.call("open", lambda _: (self._run_id, str(self._directory)))
        meeting = f"{self._directory}-{next(self._meetings)}"
        generation.call("gather", lambda rank: (meeting, rank, self._size))
        token = ranks[0].call("claim")
        for rank in ranks[1:]:
            rank.call("adopt", token)
        if not without_takeover:
            ranks[0].call("take_over")
        return ranks

    def _save_undisturbed(self, ranks: list[Rank]) -> None:
        step = self._latest + STRIDE
        Generation(ranks).call("save", lambda rank: (step, rank, self._size, ""))
        self._latest = step

    # ---- what must hold

    def _check_saved(self, old: Generation, step: int, wrong: list[str]) -> None:
        """The death of a leader is no reason for a save to fail."""
        old.until_ended()
        self._leaders.heal()
        wrong += [f"rank {number}: {rank.answer}" for number, rank in enumerate(old.ranks) if not _is_done(rank)]
        latest = read_state(self._kv, self._run_id).latest
        if latest != step:
            wrong.append(f"step {step} was saved, and latest is {latest}")

    def _check_resumed(self, new: list[Rank], at_claim: State, wrong: list[str]) -> int:
        resumed = Generation(new).call("resume")
        steps = {step for step, _ in resumed}
        wrong += [text for _, texts in resumed for text in texts]
        if len(steps) != 1:
            wrong.append(f"ranks resumed from different steps {sorted(steps)}")
        found = min(steps)
        if found != at_claim.expected:
            wrong.append(f"resumed from step {found}, where the keys demand {at_claim.expected}: {at_claim}")
        return int(found)

    def _check_told(self, old: Generation, found: int, step: int, wrong: list[str]) -> None:
        for number, rank in enumerate(old.ranks):
            if rank.is_dead:
                continue
            kind, value = rank.answer or (FAILED, ("nothing", ""))
            if kind == DONE and found != step:
                wrong.append(f"rank {number} was told that step {step} is committed, and step {found} was resumed from")
            if kind == FAILED and value[0] not in (*ENDED, *BROKEN_GROUP):
                wrong.append(f"rank {number}'s save ended with {value}")

    def _check_unfinished(self, step: int, point: str, wrong: list[str]) -> None:
        """A coordinator that thaws writes nothing by which a reader of DCP alone would take its directory for whole."""
        if point not in (BEFORE_WRITE, MID_WRITE):
            return  # it had written that before it froze
        own = Path(self._registry.at(step).uri)
        finished = [path.parent for path in self._directory.glob(f"step-{step:012d}.*/.metadata")]
        wrong += [f"a zombie has written {path.name}/.metadata" for path in finished if path != own]

    def _check_zombies(self, old: Generation, wrong: list[str]) -> int:
        count = 0
        for number, rank in enumerate(old.ranks):
            if rank.is_dead:
                continue
            for what, error in rank.call("trespass", number, self._size).items():
                count += 1
                if error not in REFUSED:
                    wrong.append(f"zombie rank {number} was not refused to {what}: {error or 'admitted'}")
        return count

    def _check_after(self, wrong: list[str]) -> None:
        """After the zombies: the checkpoints are as they were, nothing is undecided, and no bytes are lost."""
        state = read_state(self._kv, self._run_id)
        if state.latest != self._latest:
            wrong.append(f"latest went from {self._latest} to {state.latest}")
        if state.heads:
            wrong.append(f"undecided: {state.heads}")
        for checkpoint in self._registry.checkpoints(newest_first=True, limit=3):
            wrong += problems_of(checkpoint)
        if not self._is_collected:
            wrong += [f"no key names {name}" for name in strays(state, self._directory)]

    def end(self, tally: Tally) -> None:
        """Check all checkpoints there ever were, what a watcher has seen, and that garbage goes and nothing else."""
        checkpoints = self._registry.checkpoints()
        tally.problems += [text for each in checkpoints for text in problems_of(each)]
        steps = [each.step for each in checkpoints]
        seen = [commit.checkpoint.step for commit in self._take_commits(len(steps))]
        if seen != steps:
            tally.problems.append(f"a watcher saw {len(seen)} commits, and there were {len(steps)}")
        self._commits.cancel()
        self._registry.collect()
        self._check_collected(steps, tally)
        self._registry.collect(Policy(keep_last=KEPT))
        self._check_collected(steps[-KEPT:], tally)
        self._pool.give_back(self._ranks)
        shutil.rmtree(self._directory)

    def _check_collected(self, steps: list[int], tally: Tally) -> None:
        """Nothing but these checkpoints is there, and they are as they were."""
        found = self._registry.checkpoints()
        if [each.step for each in found] != steps:
            tally.problems.append(f"the collector left {len(found)} checkpoints instead of {len(steps)}")
        tally.problems += [text for each in found for text in problems_of(each)]
        kept = {Path(each.uri).name for each in found}
        left = [path.name for path in self._directory.iterdir() if path.is_dir() and path.name not in kept]
        tally.problems += [f"the collector left {name}" for name in left]

    def _take_commits(self, count: int) -> Iterator[Any]:
        with contextlib.suppress(TimeoutError):
            for _ in range(count + 1):
                yield self._commits.get(timeout_s=0.5)


def _is_done(rank: Rank) -> bool:
    return rank.answer is not None and rank.answer[0] == DONE


def chaos(todo: Sequence[Cell], *, writer: str = REGISTRY, ranks: int = 2, seed: int = 1) -> Iterator[Tally]:
    """Run trials on one cluster of three; yields the tally of each cell when it is done."""
    with contextlib.ExitStack() as stack:
        base = data_directory()
        stack.callback(shutil.rmtree, base, ignore_errors=True)
        cluster = stack.enter_context(raftkv.local(3, directory=base, flags=("--log-level", "error")))
        pool = stack.enter_context(Pool(writer, cluster.endpoints, 2 * ranks + 1))
        leaders, kv = Leaders(cluster), cluster.connect()
        for cell in todo:
            directory = base / "checkpoints" / f"{cell.kill}-{cell.point}"
            scene = Scene(pool, kv, leaders, f"chaos/{cell.kill}/{cell.point}", directory, ranks)
            yield run_cell(scene, cell, seed=seed)


def run_cell(scene: Scene, cell: Cell, *, seed: int) -> Tally:
    """Run the trials of one point and victim; a trial in which a rank got stuck is the last."""
    tally = Tally(cell.point, cell.kill)
    try:
        scene.begin()
        for number in range(cell.trials):
            chooser = random.Random(f"{seed}/{cell.point}/{cell.kill}/{number}")
            scene.trial(cell.point, cell.kill, chooser, tally)
        scene.end(tally)
    except (Stuck, raftkv.RaftKVError) as error:
        tally.problems.append(f"after {tally.trials} trials: {type(error).__name__}: {error}")
    return tally
