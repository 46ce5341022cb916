"""Nodes that keep state in memory, killed at named points of saves and restores, one after the other by a seed.

    with Cluster(RAFTKV, 3) as cluster, MemoryJob(cluster.endpoints, seed=7) as job:
        for _ in range(100):
            job.kill_one()
    job.tally.problems == []

Three nodes, each with its agent, holder and rank in one process. A node is killed with `kill -9`; another process takes
its place, with empty memory; all ranks restore. What must hold: all ranks have one step of one generation, each its own
bytes; the step is not older than the last one that was committed; and after the death of one node since then nothing
is lost. After that of two, or where copies were damaged, all ranks have nothing, or the same.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from tests.checkpoint.chaos.memory_nodes import AFTER_COMMIT, BEFORE_COMMIT, IN_RESTORE, NODES, SAVE_POINTS
from tests.checkpoint.chaos.processes import DONE, MEMORY, Pool, Rank, pump

STRIDE = 10
IDLE = "idle"
"""The point of a node that saves nothing."""
DAMAGED = 0.15
"""Share of the kills before which a node that lives has its copies damaged."""
KILLED_AGAIN = 0.25
"""Share of the restores in which another node is killed."""
SAVED_BETWEEN = 0.5
"""Share of the kills before which a save ends well."""


@dataclass
class Tally:
    """What came of the kills.

    Attributes:
        kills: by point.
        restored: generations that had their state back.
        lost: those that had nothing, as more than one copy was gone or damaged.
        restore_s: of each generation that had it back, the time of its slowest rank.
        processor_s: and the processor time of all nodes together.
        problems: what must not be.
    """

    kills: Counter[str] = field(default_factory=Counter)
    restored: int = 0
    lost: int = 0
    restore_s: list[float] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class MemoryJob:
    """A run of three nodes; see the module.

    Arguments:
        endpoints: of the cluster.
        seed: of all that is drawn.
        size_bytes: of each rank's state.
        run_id: of the run.
        reserve: processes that are started ahead.

    Attributes:
        tally: what came of it.
        nodes: that are there, by name.
    """

    def __init__(
        self, endpoints: Sequence[str], *, seed: int = 1, size_bytes: int = 1 << 16, run_id: str = "", reserve: int = 5
    ) -> None:
        self.tally = Tally()
        self._random = random.Random(seed)
        self._seed = seed
        self._pool = Pool(MEMORY, (list(endpoints), run_id or f"memory-{seed}", size_bytes), reserve)
        self.nodes = dict(zip("abc", self._pool.take(NODES), strict=True))
        self._ranks: dict[int, Rank] = {}
        self._step = 0
        self._known = -1
        self._dead_since_commit: set[str] = set()
        self._is_damaged = False
        self._enter()
        self.restore()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.close()

    @property
    def ranks(self) -> list[Rank]:
        """The nodes, in the order of ranks."""
        return [self._ranks[rank] for rank in sorted(self._ranks)]

    def call(self, name: str, *arguments: object) -> list[Any]:
        """Give all a command that must succeed; returns the answers by rank."""
        for node in self.ranks:
            node.start(name, *arguments)
        return self._answers(self.ranks)

    def _answers(self, nodes: Sequence[Rank]) -> list[Any]:
        pump(nodes, lambda: all(node.answer is not None for node in nodes))
        for node in nodes:
            if node.answer is not None and node.answer[0] != DONE:
                self._fail(f"a node failed: {node.answer[1]}")
        return [node.answer[1] if node.answer else None for node in nodes]

    def _fail(self, text: str) -> None:
        self.tally.problems.append(f"seed {self._seed}, kill {self.tally.kills.total()}: {text}")

    # ---- the run

    def _enter(self) -> None:
        for name, node in self.nodes.items():
            node.start("enter", name)
        answers = dict(zip(self.nodes, self._answers(list(self.nodes.values())), strict=True))
        if len({generation for generation, _ in answers.values()}) != 1:
            self._fail(f"nodes entered several generations: {answers}")
        self._ranks = {rank: self.nodes[name] for name, (_, rank) in answers.items()}

    def save(self) -> None:
        """Save a step that is to end well."""
        self._step += STRIDE
        committed = self.call("save", self._step, "")
        if committed != [self._step] * NODES:
            self._fail(f"step {self._step} was not saved: {committed}")
        self._committed(self._step)

    def _committed(self, step: int) -> None:
        self._known, self._dead_since_commit, self._is_damaged = step, set(), False

    def kill_one(self, point: str = "") -> None:
        """Kill a node at a point of a save, put another in its place, and restore.

        Arguments:
            point: one of ``SAVE_POINTS``; empty: it is drawn.
        """
        if self._known < 0 or self._random.random() < SAVED_BETWEEN:
            self.save()
        self._step += STRIDE
        point = point or self._random.choice(SAVE_POINTS)
        victim = 0 if point in (BEFORE_COMMIT, AFTER_COMMIT) else self._random.randrange(NODES)
        ranks = self.ranks
        for rank, node in enumerate(ranks):
            node.start("save", self._step, point if rank == victim else "")
        self._until_at(ranks[victim])
        if point == AFTER_COMMIT:
            self._committed(self._step)
        self._replace(ranks[victim], point)
        self.restore()

    def kill_node(self, rank: int) -> None:
        """Kill the node of a rank while nothing is saved, put another in its place, and restore."""
        self._replace(self.ranks[rank], IDLE, damaged=0.0)
        self._check(self.call("restore", ""))

    def forget(self) -> None:
        """Let steps begin at 0 again."""
        self.call("forget")

    def restore(self) -> None:
        """Restore, perhaps with another death on the way, until all ranks have an answer."""
        while self._known >= 0 and self._random.random() < KILLED_AGAIN:
            victim = self._random.choice(self.ranks)
            for node in self.ranks:
                node.start("restore", IN_RESTORE if node is victim else "")
            self._until_at(victim)
            self._replace(victim, IN_RESTORE)
        self._check(self.call("restore", ""))

    def _until_at(self, victim: Rank) -> None:
        """Wait until a node stands at its point, or will not come there."""
        pump(self.ranks, lambda: bool(victim.at) or victim.answer is not None)

    def _replace(self, victim: Rank, point: str, damaged: float = DAMAGED) -> None:
        name = next(name for name, node in self.nodes.items() if node is victim)
        victim.kill()
        self.tally.kills[point] += 1
        self._dead_since_commit.add(name)
        alive = [node for node in self.nodes.values() if node is not victim]
        self.nodes[name] = self._pool.take(1)[0]
        self.nodes[name].start("enter", name)
        self._answers(alive)  # what they were at ends with the generation, or well
        if self._random.random() < damaged:
            self._random.choice(alive).call("damage")
            self._is_damaged = True
        for other, node in self.nodes.items():
            if node in alive:
                node.start("enter", other)
        answers = dict(zip(self.nodes, self._answers(list(self.nodes.values())), strict=True))
        self._ranks = {rank: self.nodes[other] for other, (_, rank) in answers.items()}
        self._pool.give_back([victim])

    def _check(self, answers: Sequence[dict[str, Any]]) -> None:
        if any("error" in answer or answer["wrong"] for answer in answers):
            self._fail(f"wrong or failed: {answers}")
        found = {(answer.get("step"), answer.get("generation")) for answer in answers}
        if len(found) != 1:
            self._fail(f"ranks have several states: {answers}")
        step = answers[0].get("step", -1)
        if step < 0:
            if self._known >= 0 and len(self._dead_since_commit) < 2 and not self._is_damaged:
                self._fail(f"step {self._known} is lost by the death of {self._dead_since_commit}")
            self.tally.lost += self._known >= 0
            self._step, self._known = 0, -1
            return
        if not self._known <= step <= self._step:
            self._fail(f"step {step} is stale: {self._known} was committed, {self._step} was begun")
        self._step = self._known = step
        self.tally.restored += 1
        self.tally.restore_s.append(max(answer["took_s"] for answer in answers))
        self.tally.processor_s.append(sum(answer["processor_s"] for answer in answers))
