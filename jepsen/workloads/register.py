"""Registers: put, get and compare-and-swap on single keys, the swap as a conditional txn.

Conditions are on the value, the revision or the version last seen, so that both the search (which knows only values)
and the replay (which knows everything) have something to check. Keys rotate after 200 operations.
"""

from __future__ import annotations

from jepsen.checker import Checker
from jepsen.client import Client
from jepsen.history import Operation
from jepsen.ops import Compare, KeyValue, Put, Range, RangeResult, Txn, ran
from jepsen.workloads.base import Rotation

_PUT, _GET = 0.3, 0.65


class Register:
    """Puts, gets and compare-and-sets of single keys."""

    name = "register"

    def __init__(self) -> None:
        self.checkers: dict[str, Checker] = {}
        self._keys = Rotation("r", active=5, uses_max=200)
        self._seen: dict[tuple[str, str], KeyValue] = {}

    async def step(self, client: Client) -> None:
        """Send one operation on one key."""
        key = self._keys.take(client.rng.choice(self._keys.active))
        choice = client.rng.random()
        if choice < _PUT:
            await client.call(Put(key, client.fresh_value(), previous=client.rng.random() < 0.5))
        elif choice < _GET or (client.name, key) not in self._seen:
            self._note(client, await client.call(Range(key)))
        else:
            self._note(client, await client.call(self._swap(client, key)))

    async def finish(self, client: Client) -> None:
        """Read every key."""
        for key in self._keys.used:
            await client.call(Range(key))

    def _swap(self, client: Client, key: str) -> Txn:
        seen = self._seen[client.name, key]
        guard = client.rng.choice(
            [
                Compare(key, "value", "=", seen.value),
                Compare(key, "mod", "=", seen.mod),
                Compare(key, "version", "=", seen.version),
            ]
        )
        return Txn((guard,), (Range(key), Put(key, client.fresh_value())), (Range(key),))

    def _note(self, client: Client, operation: Operation) -> None:
        """Remember what the client saw, for later conditions."""
        if operation.result is None:
            return
        for _, answer in ran(operation.request, operation.result):
            if isinstance(answer, RangeResult) and answer.kvs:
                self._seen[client.name, answer.kvs[0].key] = answer.kvs[0]
