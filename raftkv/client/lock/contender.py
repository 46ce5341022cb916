"""Waiting in a queue: the recipe under locks and elections.

Every contender has a key ``NAME/LEASEHEX``, attached to its lease; the one with the lowest create revision has what
they contend for. Others wait for the deletion of the key right before theirs, so that a release wakes one and not all.
These are the keys of etcd's own recipes: members' Lock and Election services and Go's programs wait in the same queue.

What makes it safe:

1. After every wait, and before anybody is first, one txn reads the own key (still there, with the same
   create revision) *and* the keys before it.
2. A step that may or may not have happened is done again: a key says by its value or lease whose it is.
3. The create revision is a fencing token. Losing the lease, or the key, is an error where it is relied upon.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING, TypeVar

from raftkv.client.errors import FenceLost
from raftkv.client.keys import Text, to_bytes
from raftkv.client.kv.compares import create_revision
from raftkv.client.kv.compares import value as value_of
from raftkv.client.kv.operations import Delete, Get, GetRange, Put
from raftkv.client.kv.txn import Txn
from raftkv.client.rpc.retry import until_answered
from raftkv.client.values import KeyValue
from raftkv.client.watch.watcher import Request, Watcher
from raftkv.errors import CompactedError

if TYPE_CHECKING:
    from raftkv.client.lease.lease import Lease
    from raftkv.client.scope import Scope

Result = TypeVar("Result")


class Contender:
    """One entry of a queue.

    Attributes:
        key: of this contender, as the client sees it.
        fence: its create revision; 0: not in the queue.
    """

    def __init__(self, scope: Scope, name: Text, lease: Lease, error: type[FenceLost]) -> None:
        self.prefix = to_bytes(name) + b"/"
        self.key = self.prefix + b"%x" % lease.id
        self.fence = 0
        self._scope = scope
        self._lease = lease
        self._error = error
        self._value: Text = b""
        self._asked = False

    @property
    def guard_key(self) -> bytes:
        """The key as the store knows it."""
        return self._scope.space.key(self.key)

    def lost(self, reason: str = "") -> FenceLost:
        """Make the error of a place that is lost."""
        return self._error(self.guard_key, self.fence, reason)

    async def enqueue(self, value: Text) -> KeyValue | None:
        """Enter the queue; returns the key as it was, if it was in the queue already."""
        self._value, self._asked = value, True

        async def step() -> KeyValue | None:
            txn = Txn(self._scope).when(create_revision(self.key) == 0)
            ok, results = await txn.then(Put(self.key, value, self._lease)).otherwise(Get(self.key)).commit()
            found: KeyValue | None = None if ok else results[0]
            self.fence = results[0].revision if ok else results[0].create_revision
            return found

        return await until_answered(step)

    async def predecessor(self) -> tuple[KeyValue | None, int]:
        """Return who is right before this place, and as of which revision; None: nobody, it is its turn.

        Raises:
            FenceLost: the place itself is gone.
        """

        async def step() -> tuple[KeyValue | None, int]:
            before = GetRange(
                self.prefix,
                prefix=True,
                limit=1,
                sort_by="create_revision",
                descending=True,
                keys_only=True,
                max_create_revision=self.fence - 1,
            )
            done = await Txn(self._scope).when(create_revision(self.key) == self.fence).then(before).commit()
            if not done.succeeded:
                raise self.lost()
            return (done.results[0][0] if done.results[0] else None), done.revision

        return await until_answered(step)

    async def wait_turn(self) -> int:
        """Wait until nobody is before this place; returns the revision as of which that is so.

        Raises:
            FenceLost: the place is gone.
            LeaseLost: the lease is.
        """
        while True:
            before, revision = await self.predecessor()
            if before is None:
                self._lease.check()
                return revision
            await self._wait_deleted(before.key, revision + 1)

    async def _wait_deleted(self, key: bytes, start_revision: int) -> None:
        hub = self._scope.hub
        watcher = Watcher(Request(self._scope.space.key(key), start_revision=start_revision, no_put=True))
        hub.add(watcher)
        try:
            await hub.next_response(watcher)
        except CompactedError:
            return  # whatever it was: who is before us is looked up again
        finally:
            hub.remove(watcher)

    async def leave(self, timeout_s: float | None = None) -> bool:
        """Leave the queue, if need be without knowing if it was ever in it; False: it was not.

        Arguments:
            timeout_s: None: the client's.

        Raises:
            StatusError: the cluster could not be told.
        """
        if not self._asked:
            return False
        attempts = 0

        async def step() -> bool:
            nonlocal attempts
            attempts += 1
            if self.fence:
                ours = create_revision(self.key) == self.fence
            else:
                ours = value_of(self.key) == to_bytes(self._value)
            return (await Txn(self._scope).when(ours).then(Delete(self.key)).commit(timeout_s=timeout_s)).succeeded

        left = await until_answered(step, self._scope.timeout_s if timeout_s is None else timeout_s)
        # If the key was gone at a second attempt, the first had done it for all that can be known.
        return left or attempts > 1


async def within(timeout_s: float | None, waiting: Awaitable[Result]) -> Result:
    """Wait no longer than that; ``TimeoutError`` else.

    Arguments:
        timeout_s: None: for ever.
        waiting: what to wait for.
    """
    async with asyncio.timeout(timeout_s):
        return await waiting
