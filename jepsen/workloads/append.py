"""List append: transactions that read a few lists and append to some, on condition of the revisions they read.

Each step reads the lists in one txn. A second txn requires that they are unchanged, reads them again and appends; if
they have changed, the second txn is only a read. Checked for cycles (``checkers/append.py``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from jepsen.checker import Checker
from jepsen.checkers import append
from jepsen.client import Client
from jepsen.history import Operation
from jepsen.ops import Compare, KeyValue, Part, Put, Range, RangeResult, Txn, ran
from jepsen.workloads.base import Rotation

_FINAL_BATCH = 32


class Append:
    """Conditional appends to four active lists, each replaced after 80 uses."""

    name = "append"

    def __init__(self) -> None:
        self.checkers: dict[str, Checker] = {"append": append.check}
        self._keys = Rotation("l", active=4, uses_max=80)

    async def step(self, client: Client) -> None:
        """Read some lists, then append to one or two of them if they are unchanged."""
        active = self._keys.active
        keys = [self._keys.take(key) for key in client.rng.sample(active, client.rng.randint(1, 3))]
        reads = tuple(Range(key) for key in keys)
        seen = await client.call(Txn((), reads))
        if seen.result is None or client.rng.random() < 0.2:
            return
        lists = dict(_lists(seen))
        guards = tuple(Compare(key, "mod", "=", lists[key].mod if key in lists else 0) for key in keys)
        chosen = client.rng.sample(keys, client.rng.randint(1, min(2, len(keys))))
        writes: tuple[Part, ...] = tuple(Put(key, _longer(lists.get(key), client)) for key in chosen)
        await client.call(Txn(guards, (*reads, *writes), reads))

    async def finish(self, client: Client) -> None:
        """Read every list."""
        used = self._keys.used
        for start in range(0, len(used), _FINAL_BATCH):
            await client.call(Txn((), tuple(Range(key) for key in used[start : start + _FINAL_BATCH])))


def _lists(operation: Operation) -> Iterator[tuple[str, KeyValue]]:
    if operation.result is None:
        return
    for part, answer in ran(operation.request, operation.result):
        if isinstance(answer, RangeResult) and answer.kvs:
            yield part.key, answer.kvs[0]


def _longer(kv: KeyValue | None, client: Client) -> str:
    elements = json.loads(kv.value) if kv is not None else []
    return json.dumps([*elements, client.fresh_value()], separators=(",", ":"))
