"""What the simulator of training runs does, as traces that TLC compares with ``docs/spec/Rendezvous.tla``.

While ``recording`` lasts, each change of the keys of a run, and each start and end of a node's workers, becomes a line.
A window is some lines in a row; it begins with what the store and the nodes hold.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from raftkv.client.values import PUT, Event
from raftkv.training.config import TOPOLOGY
from raftkv.training.records import RUNNING, GenerationRecord, Node, RunKeys, State
from raftkv.training.rendezvous.arbiter import View
from raftkv.training.rendezvous.registration import Registration
from raftkv.training.rendezvous.world import World, WorldFence
from tests.sim.mutants.registry import Patches
from tests.spec.recorder import literal, windows_module
from tests.training.sim.checkers import RunChecker
from tests.training.sim.run import RUN_ID, Simulation

if TYPE_CHECKING:
    from tests.training.sim.agent import Agent

LINES_MAX = 60
"""Limit of a window: TLC tries each moment at which the arbiter may have seen the keys."""
NODES_MAX = 12
"""Nodes that a run may have seen; of one with more the rest is not recorded."""
KEYS = RunKeys(RUN_ID)
ABSENT = {"there": False, "want": 0, "running": 0}


class Traces:
    """Windows of some simulations."""

    def __init__(self) -> None:
        self.windows: list[dict[str, Any]] = []

    def module(self) -> str:
        """Return the windows as a module of TLA+."""
        nodes = list(range(1, NODES_MAX + 1))
        return windows_module([f"NodesThere == {literal(set(nodes))}", f"Traces == {literal(self.windows)}"])


class Trace:
    """One run, and what happens in it."""

    def __init__(self, simulation: Simulation, traces: Traces) -> None:
        self._windows, self._checker = traces.windows, simulation.checker
        self._keeps_order = simulation.settings.config.rank_policy != TOPOLOGY
        self._number: dict[str, int] = {}
        self._agents: dict[int, Agent] = {}
        self._rounds: list[list[int]] = []
        self._is_running = False
        self._key = [dict(ABSENT) for _ in range(NODES_MAX)]
        self._born, self._started, self._is_on = [0] * NODES_MAX, [0] * NODES_MAX, [False] * NODES_MAX
        self._lines_left = 0
        self._is_over = self._has_begun = False
        simulation.cluster.store.on_commit.append(self._on_commit)

    def _line(self, **told: Any) -> None:
        """Write a line into the present window; of what the arbiter may have seen before a window nothing is known, so
        each begins where one takes office.
        """
        if not self._lines_left and (told["op"] == "office" or not self._has_begun):
            state = {
                "rounds": [list(members) for members in self._rounds], "isRunning": self._is_running,
                "key": [dict(key) for key in self._key], "born": list(self._born), "started": list(self._started),
                "isOn": list(self._is_on),
            }  # fmt: skip
            self._windows.append({"init": state, "keepsOrder": self._keeps_order, "lines": []})
            self._lines_left, self._has_begun = LINES_MAX, True
        if self._lines_left:
            self._lines_left -= 1
            self._windows[-1]["lines"].append(told)

    def _stops(self) -> None:
        """Note which nodes have stopped their workers since the last line."""
        for number, agent in self._agents.items():
            if self._is_on[number - 1] and not agent.workers:
                self._line(op="stop", n=number)
                self._is_on[number - 1] = False

    def starts(self, agent: Agent, world: World) -> None:
        """Note that a node is about to start its workers."""
        if self._is_over:
            return
        self._stops()
        number = self._number[world.member.id]
        members = [self._number.get(member.id, 0) for member in world.members]
        self._line(op="start", n=number, generation=world.generation, members=members)
        self._agents[number] = agent
        self._started[number - 1], self._is_on[number - 1] = world.generation, True

    def _on_commit(self, revision: int, events: Sequence[Event]) -> None:
        for event in events:
            key = event.kv.key.decode()
            if key.startswith(KEYS.nodes):
                self._number.setdefault(key.rsplit("/", 1)[1], len(self._number) + 1)
        self._is_over = self._is_over or len(self._number) > NODES_MAX
        if self._is_over:
            return
        self._stops()
        ordered = sorted(events, key=lambda event: event.kv.key.decode() == KEYS.state)  # what begins, before its state
        for event in ordered:
            self._event(event.kv.key.decode(), event)

    def _event(self, key: str, event: Event) -> None:
        if key.startswith(KEYS.nodes):
            self._node(self._number[key.rsplit("/", 1)[1]], event)
        elif event.type != PUT:
            return
        elif key == KEYS.round:
            record = GenerationRecord.decode(event.kv.value)
            members = [self._number.get(member.id, 0) for member in record.members]
            self._line(op="begin", generation=record.generation, members=members)
            self._rounds = [*self._rounds[: record.generation - 1], members]
            self._is_running = True
        elif key == KEYS.state:
            runs = State.decode(event.kv.value).phase == RUNNING
            if self._is_running and not runs:
                self._line(op="break")
                self._is_running = False
        elif key == KEYS.arbiter:
            self._line(op="office")
        elif "/sync/" in key:
            written = json.loads(event.kv.value)
            if isinstance(written, dict):  # else it is the end of a node's work
                self._line(op="write", n=self._number[written["node"]], generation=written["epoch"])

    def _node(self, number: int, event: Event) -> None:
        known = self._key[number - 1]
        if event.type != PUT:
            self._line(op="lose", n=number)
            known |= {"there": False, "running": 0}
            return
        node = Node.decode(event.kv.value)
        self._line(op="declare" if known["there"] else "register", n=number, want=node.want, running=node.running)
        if not known["there"]:
            self._born[number - 1] = len(self._rounds)
        known |= {"there": True, "want": node.want, "running": node.running}


@contextlib.contextmanager
def recording() -> Iterator[Traces]:
    """Record all simulations that begin while the context lasts, one after the other."""
    traces, patches = Traces(), Patches()
    of: dict[int, Trace] = {}

    def init(simulation: Simulation, *arguments: Any) -> None:
        original(simulation, *arguments)
        of[id(simulation.checker)] = Trace(simulation, traces)

    def starts(checker: RunChecker, agent: Agent, world: World) -> None:
        of[id(checker)].starts(agent, world)
        begin(checker, agent, world)

    original = patches.set(Simulation, "__init__", init)
    begin = patches.set(RunChecker, "starts", starts)
    try:
        yield traces
    finally:
        patches.undo()


# ---- planted bugs, which TLC must reject


def _not_waited_for(patches: Patches) -> None:
    patches.set(View, "still_out", lambda self: [])


def _nothing_told(patches: Patches) -> None:
    async def again(self: Registration) -> None:
        self.generation = 0
        await original(self)

    original = patches.set(Registration, "_register_again", again)


def _fence_without_round(patches: Patches) -> None:
    def init(self: WorldFence, world: World) -> None:
        original(self, world)
        self.conditions = self.conditions[1:]

    original = patches.set(WorldFence, "__init__", init)


PLANTED = {
    "members that are still out are not waited for": _not_waited_for,
    "a node that registers anew does not tell what it runs": _nothing_told,
    "no round in the fence of a world": _fence_without_round,
}
