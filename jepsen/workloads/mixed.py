"""The load of the kill storms: mostly puts of unique values, every one checked, and some of all other requests.

The weights resemble etcd's own robustness traffic: mostly puts, then fresh and stale reads, reads of the past and of
ranges, deletes, swaps and small transactions.
"""

from __future__ import annotations

from jepsen.checker import Checker
from jepsen.client import Client
from jepsen.ops import Compare, Delete, Put, Range, Request, Txn
from jepsen.workloads.base import Rotation

_WEIGHTS = {"put": 45, "get": 15, "stale": 8, "list": 4, "past": 4, "delete": 5, "swap": 10, "txn": 9}
_START, _END = "k", "l"


class Mixed:
    """Weighted single requests on ten active keys and ten more for transactions."""

    name = "mixed"

    def __init__(self) -> None:
        self.checkers: dict[str, Checker] = {}
        self._keys = Rotation(_START, active=10, uses_max=300)
        self._txn_keys = Rotation(_START + "t", active=10, uses_max=600)

    async def step(self, client: Client) -> None:
        """Send one request."""
        kind = client.rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
        key = self._keys.take(client.rng.choice(self._keys.active))
        await client.call(self._request(client, kind, key))

    async def finish(self, client: Client) -> None:
        """Read everything."""
        await client.call(Range(_START, _END))

    def _request(self, client: Client, kind: str, key: str) -> Request:
        rng = client.rng
        match kind:
            case "put":
                return Put(key, client.fresh_value(), previous=rng.random() < 0.2)
            case "get":
                return Range(key)
            case "stale":
                return Range(key, serializable=True)
            case "list":
                return Range(_START, _END, serializable=rng.random() < 0.5)
            case "past":
                return Range(_START, _END, rev=max(1, client.last_rev - rng.randint(0, 60)))
            case "delete":
                return Delete(key, previous=True)
            case "swap":
                create = (Range(key), Put(key, client.fresh_value()))
                return Txn((Compare(key, "version", "=", rng.choice([0, 1])),), create, (Range(key),))
            case _:
                keys = [self._txn_keys.take(name) for name in rng.sample(self._txn_keys.active, 3)]
                puts = tuple(Put(name, client.fresh_value()) for name in keys[:2])
                return Txn((Compare(keys[2], "version", "<", 50),), (*puts, Range(keys[2])), (Delete(keys[0]), puts[1]))
