"""What the simulator of checkpoints does, as traces that TLC compares with ``docs/spec/Checkpoint.tla``.

While ``recording`` lasts, each txn that changes the checkpoints of a run becomes a line for each step that it is. A
window is some lines in a row; it begins with all that the store holds of them.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from raftkv.checkpoint.keys import MEMORY, RANDOM_DIGITS
from raftkv.checkpoint.records import AttemptRecord, Checkpoint, FenceRecord, Latest
from raftkv.client.values import PUT, Event
from tests.checkpoint.sim.programs import DCP, TENSORS
from tests.checkpoint.sim.run import Simulation
from tests.sim.mutants.registry import Patches
from tests.spec.recorder import LINES_MAX, literal, windows_module

RUN = "/raftkv/checkpoint/run/job/"
LATEST = "/raftkv/checkpoint/latest/job/"
KINDS = (DCP, TENSORS, MEMORY)
UNKNOWN = {"op": "unknown"}
"""A change that is no step of the specification."""


class Traces:
    """Windows of some simulations, and all attempts that are named in them."""

    def __init__(self) -> None:
        self.attempts: list[dict[str, Any]] = []
        self.windows: list[dict[str, Any]] = []

    def module(self) -> str:
        """Return the windows as a module of TLA+."""
        tables = {"Attempts": self.attempts, "Traces": self.windows, "KindsThere": set(KINDS)}
        return windows_module([f"{name} == {literal(table)}" for name, table in tables.items()])


class Trace:
    """The checkpoints of one simulation, and what happens to them."""

    def __init__(self, simulation: Simulation, traces: Traces) -> None:
        self.attempts, self.windows = traces.attempts, traces.windows
        self._simulation = simulation
        self._lines_left = 0
        self._number: dict[tuple[str, str], int] = {}
        self._begun: list[int] = []
        self._claim = 0
        self._heads: set[int] = set()
        self._parts: set[tuple[int, int]] = set()
        self._records: dict[tuple[str, int], int] = {}
        self._latest = dict.fromkeys(KINDS, 0)
        self._deleting: set[int] = set()
        self._holds: dict[str, int] = {}
        self._was: dict[tuple[str, int], int] = {}
        simulation.cluster.store.on_commit.append(self._on_commit)

    def _state(self) -> dict[str, Any]:
        return {
            "heads": set(self._heads),
            "records": set(self._records.values()),
            "latest": dict(self._latest),
            "deleting": set(self._deleting),
            "holds": set(self._holds.values()),
        }

    def _on_commit(self, revision: int, events: Sequence[Event]) -> None:
        changed = {event.kv.key.decode(): event for event in events}
        before = self._state() | {"claim": self._claim, "begun": len(self._begun), "parts": set(self._parts)}
        lines = list(self._lines(revision, changed))
        if not lines:
            return
        if self._lines_left < len(lines):
            self.windows.append({"init": before, "lines": []})
            self._lines_left = LINES_MAX
        self._lines_left -= len(lines)
        state = self._state()
        for line in lines:
            last = line is lines[-1]
            told = {"a": 1, **line, "isLast": last, **({"s": state} if last else {})}
            self.windows[-1]["lines"].append(told)

    # ---- from keys to steps

    def _lines(self, revision: int, changed: Mapping[str, Event]) -> Iterator[dict[str, Any]]:
        sender = self._simulation.checker.sender
        claim = 0 if sender is None or sender.claim is None else sender.claim.generation
        puts = {key: event for key, event in changed.items() if event.type == PUT}
        gone = [key.removeprefix(RUN).split("/") for key in changed if key.startswith(RUN) and key not in puts]
        if (fence := puts.get(f"{RUN}fence")) is not None:
            self._claim = FenceRecord.decode(fence.kv.value).generation
            yield {"op": "claim", "claim": self._claim}
        for key, event in puts.items():
            parts = key.removeprefix(RUN).split("/") if key.startswith(RUN) else [""]
            if parts[0] == "attempt" and parts[4:5] != ["offer"]:
                yield self._attempted(revision, parts, event, claim)
            elif parts[0] == "record" and event.kv.version == 1:
                yield from self._committed(parts, event, claim, gone)
            elif parts[0] == "hold":
                yield from self._held(key, parts)
        if (
            not any(key.startswith(f"{RUN}record/memory/") for key in puts)
            and f"{LATEST}{MEMORY}" in changed.keys() - puts
        ):
            self._forget_memory(gone)
            yield {"op": "forget"}
        for parts in [each for each in gone if each[0] == "attempt" and each[3] == "head"]:
            yield self._given_up(parts, claim, puts)
        for parts in [each for each in gone if each[0] == "record"]:
            yield self._deleted(parts, puts)
        yield from self._swept(changed, gone)
        for kind in self._latest:
            if (event := puts.get(f"{LATEST}{kind}")) is not None:
                self._latest[kind] = Latest.decode(event.kv.value).step

    def _attempted(self, revision: int, parts: list[str], event: Event, claim: int) -> dict[str, Any]:
        which = parts[1], parts[2]
        if parts[3] == "head":
            head = AttemptRecord.decode(event.kv.value)
            seen = bisect_right(self._begun, head.number // RANDOM_DIGITS)
            self._begun.append(revision)
            ranks = set(range(head.world_size))
            told = {"kind": head.kind, "step": head.step, "claim": head.generation, "number": seen, "ranks": ranks}
            if which not in self._number:
                self.attempts.append(told)
                self._number[which] = len(self.attempts)
            self._heads.add(self._number[which])
            return {"op": "begin", "claim": claim, "a": self._number[which]}
        number, rank = self._number[which], int(parts[4])
        self._parts.add((number, rank))
        return {"op": "prepare", "claim": claim, "a": number, "rank": rank}

    def _committed(self, parts: list[str], event: Event, claim: int, gone: list[list[str]]) -> Iterator[dict[str, Any]]:
        checkpoint = Checkpoint.decode(event.kv.value)
        number = self._number[checkpoint.kind, str(checkpoint.id)]
        if checkpoint.kind == MEMORY:
            self._forget_memory(gone)
        self._records[checkpoint.kind, checkpoint.step] = number
        self._was[checkpoint.kind, checkpoint.step] = number
        head = ["attempt", checkpoint.kind, str(checkpoint.id), "head"]
        if head in gone:
            gone.remove(head)
            self._heads.discard(number)
        yield {"op": "commit", "claim": claim, "a": number}

    def _forget_memory(self, gone: list[list[str]]) -> None:
        gone[:] = [each for each in gone if each[:2] not in (["record", MEMORY], ["deleting", MEMORY])]
        self._records = {at: number for at, number in self._records.items() if at[0] != MEMORY}
        self._deleting = {number for number in self._deleting if self.attempts[number - 1]["kind"] != MEMORY}
        self._latest[MEMORY] = 0

    def _held(self, key: str, parts: list[str]) -> Iterator[dict[str, Any]]:
        number = self._was.get((parts[1], int(parts[2])), 0)
        if key not in self._holds and number not in self._holds.values():
            yield {"op": "pin", "a": number} if number else UNKNOWN
        self._holds[key] = number

    def _given_up(self, parts: list[str], claim: int, puts: Mapping[str, Event]) -> dict[str, Any]:
        number = self._number[parts[1], parts[2]]
        self._heads.discard(number)
        if f"{RUN}deleting/{parts[1]}/{parts[2]}" not in puts:
            return UNKNOWN
        self._deleting.add(number)
        self._parts = {part for part in self._parts if part[0] != number}
        return {"op": "abort", "claim": claim, "a": number}

    def _deleted(self, parts: list[str], puts: Mapping[str, Event]) -> dict[str, Any]:
        number = self._records.pop((parts[1], int(parts[2])))
        attempt = next(text for (_, text), known in self._number.items() if known == number)
        if f"{RUN}deleting/{parts[1]}/{attempt}" not in puts:
            return UNKNOWN
        self._deleting.add(number)
        return {"op": "delete", "a": number}

    def _swept(self, changed: Mapping[str, Event], gone: list[list[str]]) -> Iterator[dict[str, Any]]:
        for number in sorted(
            {self._number[each[1], each[2]] for each in gone if each[0] == "attempt" and each[3] == "rank"}
        ):
            if any(part[0] == number for part in self._parts):
                self._parts = {part for part in self._parts if part[0] != number}
                yield {"op": "clean", "a": number}
        for each in gone:
            if each[0] == "deleting":
                number = self._number[each[1], each[2]]
                self._deleting.discard(number)
                yield {"op": "sweep", "a": number}
        for key in [key for key in self._holds if key in changed and changed[key].type != PUT]:
            number = self._holds.pop(key)
            if number not in self._holds.values():
                yield {"op": "unpin", "a": number} if number else UNKNOWN


@contextlib.contextmanager
def recording() -> Iterator[Traces]:
    """Record all simulations that begin while the context lasts, one after the other."""
    traces, patches = Traces(), Patches()

    def init(simulation: Simulation, *arguments: Any) -> None:
        original(simulation, *arguments)
        Trace(simulation, traces)

    original = patches.set(Simulation, "__init__", init)
    try:
        yield traces
    finally:
        patches.undo()
