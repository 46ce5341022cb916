"""What a collector decides on: the checkpoints of a run, and why some of them must stay.

``latest`` of a kind is read before its records, and every txn that changes one of them changes ``latest`` too. So if a
deletion finds ``latest`` as it was read, the whole picture of the kind is still right: counts, sizes and extremes are
made from it.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace

from raftkv.checkpoint.find.lookup import PAGE
from raftkv.checkpoint.keys import STEP_MAX, RegistryKeys, is_comparable
from raftkv.checkpoint.records import Checkpoint, Extremes, Latest, Reference
from raftkv.checkpoint.retention.holds import holds
from raftkv.client.control.control import Control, txn_until_answered, until_answered
from raftkv.client.control.records import readable
from raftkv.client.kv.operations import get_range
from raftkv.client.scope import prefix_end


@dataclass(slots=True)
class KindState:
    """One kind of checkpoints.

    Attributes:
        latest, revision: the summary, and of its last change.
        records: step to checkpoint, and to the revision of the record's last change.
    """

    latest: Latest
    revision: int
    records: dict[int, tuple[Checkpoint, int]] = field(default_factory=dict)
    _values: dict[str, list[tuple[float, int]]] | None = None

    def remove(self, step: int) -> Latest:
        """Leave out a checkpoint, and return the summary of those that are left. Costs the same however many these are.

        If the deletion is refused, nothing here is right any more: it must be loaded again.
        """
        values_of = self._sum_up() if self._values is None else self._values
        gone, _ = self.records.pop(step)
        best = dict(self.latest.best)
        for name, value in gone.metrics.items():
            if is_comparable(value):
                values = values_of[name]
                del values[bisect_left(values, (value, step))]
                if name in best:
                    best.pop(name)
                    best |= {name: _extremes(values)} if values else {}
        size_bytes = self.latest.size_bytes - gone.size_bytes
        self.latest = replace(self.latest, count=len(self.records), size_bytes=size_bytes, best=best)
        return self.latest

    def _sum_up(self) -> dict[str, list[tuple[float, int]]]:
        """Make the sum of all sizes, and return the values of each metric with their steps, sorted."""
        checkpoints = [checkpoint for checkpoint, _ in self.records.values()]
        self.latest = replace(self.latest, size_bytes=sum(each.size_bytes for each in checkpoints))
        found: dict[str, list[tuple[float, int]]] = {}
        for each in checkpoints:
            for name, value in each.metrics.items():
                if is_comparable(value):
                    found.setdefault(name, []).append((value, each.step))
        for values in found.values():
            values.sort()
        self._values = found
        return found


def _extremes(values: list[tuple[float, int]]) -> Extremes:
    """Return the extremes of sorted values; of equal ones the newer step counts."""
    low = values[bisect_left(values, (values[0][0], STEP_MAX + 1)) - 1]
    return Extremes(*low, *values[-1])


@dataclass(slots=True)
class RunState:
    """All kinds of a run.

    Attributes:
        kinds: by name.
        held: what somebody holds, and who.
    """

    kinds: dict[str, KindState]
    held: dict[Reference, list[str]]

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """All of the run."""
        return [checkpoint for kind in self.kinds.values() for checkpoint, _ in kind.records.values()]


async def load(control: Control, run_id: str) -> RunState:
    """Read all checkpoints of a run.

    Arguments:
        control: the store.
        run_id: of the run.
    """
    keys = RegistryKeys(run_id)
    listed = await until_answered(lambda: control.txn((), [get_range(keys.latest_all, prefix=True)]))
    kinds = {
        item.key.decode(errors="replace").rpartition("/")[2]: KindState(latest, item.mod_revision)
        for item in listed.results[0].items
        for latest in readable(Latest, [item])
    }
    for name, kind in kinds.items():
        await _load_records(control, keys.records_of(name), kind)
    held: dict[Reference, list[str]] = {}
    for info in await holds(control, run_id):
        held.setdefault(info.checkpoint, []).append(str(info))
    return RunState(kinds, held)


async def _load_records(control: Control, prefix: str, kind: KindState) -> None:
    start: bytes = prefix.encode()
    while start:
        operation = get_range(start, prefix_end(prefix.encode()), limit=PAGE)
        result = await txn_until_answered(control, (), [operation])
        page = result.results[0]
        for item in page.items:
            for checkpoint in readable(Checkpoint, [item]):
                kind.records[checkpoint.step] = (checkpoint, item.mod_revision)
        start = page.items[-1].key + b"\0" if page.more else b""
