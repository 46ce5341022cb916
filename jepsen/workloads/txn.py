"""Random transactions over a few keys: all kinds of conditions, and puts, deletes and reads in both branches.

Only replay checks them: it knows the right answer and effect of each. A branch with a delete always has a put too: its
value identifies the request of the deletion if the answer is lost.
"""

from __future__ import annotations

import random

from jepsen.checker import Checker
from jepsen.client import Client
from jepsen.ops import Compare, Delete, Part, Put, Range, Relation, Target, Txn
from jepsen.workloads.base import Rotation

_TARGETS: tuple[Target, ...] = ("value", "version", "create", "mod")
_RELATIONS: tuple[Relation, ...] = ("=", "!=", ">", "<")
_START, _END = "t", "u"


class Transactions:
    """Multi-key txns on six active keys."""

    name = "txn"

    def __init__(self) -> None:
        self.checkers: dict[str, Checker] = {}
        self._keys = Rotation(_START, active=6, uses_max=400)

    async def step(self, client: Client) -> None:
        """Send one transaction, or a read of all keys."""
        rng = client.rng
        if rng.random() < 0.1:
            await client.call(Range(_START, _END, rev=max(0, client.last_rev - rng.randint(0, 40))))
            return
        keys = [self._keys.take(key) for key in rng.sample(self._keys.active, 4)]
        guards = tuple(self._guard(client, rng.choice(keys)) for _ in range(rng.randint(0, 2)))
        await client.call(Txn(guards, self._branch(client, keys), self._branch(client, keys)))

    async def finish(self, client: Client) -> None:
        """Read everything."""
        await client.call(Range(_START, _END))

    def _guard(self, client: Client, key: str) -> Compare:
        rng = client.rng
        target = rng.choice(_TARGETS)
        operand: str | int = client.name if target == "value" else _operand(rng, target, client.last_rev)
        return Compare(key, target, rng.choice(_RELATIONS), operand)

    def _branch(self, client: Client, keys: list[str]) -> tuple[Part, ...]:
        """Return operations on distinct keys, because a key may be written only once."""
        marked, *others = client.rng.sample(keys, client.rng.randint(1, 4))
        parts = tuple(_part(client, key) for key in others)
        if any(isinstance(part, Delete) for part in parts):
            return (*parts, Put(marked, client.fresh_value()))
        return (*parts, Range(marked))


def _operand(rng: random.Random, target: Target, last_rev: int) -> int:
    return rng.choice([0, 1, 2, 5]) if target == "version" else max(0, last_rev - rng.randint(0, 20))


def _part(client: Client, key: str) -> Part:
    choice = client.rng.random()
    if choice < 0.55:
        return Put(key, client.fresh_value(), previous=client.rng.random() < 0.3)
    if choice < 0.7:
        return Delete(key, previous=True)
    return Range(key) if choice < 0.9 else Range(_START, _END)
