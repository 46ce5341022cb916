"""Election.Observe: the leader of an election, and every leader and proclamation after it, in the order of revisions.

    revision   5: a leads, value 1     7: a proclaims 2     9: a resigns, b is next     12: b resigns     15: c comes
    sent       (a, 1)                  (a, 2)               (b, its value)              nothing           (c, ...)

Invariants
- What is sent is who led at the end of each revision that touched the election, so nothing is left out and nothing
  comes twice, however late the changes are looked at. (etcd asks anew after each resignation, and may skip a leader of
  short life.)
- A client that does not read costs what ``local_watch`` keeps for it. Where the history that it still needed was
  compacted meanwhile, it goes on from the present.
"""

from __future__ import annotations

from raftkv import errors
from raftkv.pb import election_pb2, kv_pb2
from raftkv.rpc.server.stream import StreamCall
from raftkv.rpc.shares import identity_of
from raftkv.server.recipes.local_client import Recipe, prefix_end
from raftkv.server.recipes.local_watch import LocalWatch


class Observer:
    """One stream of leaders.

    Arguments:
        recipe: reads and writes on the member.
        name: of the election.
        call: where they are sent.
    """

    def __init__(self, recipe: Recipe, name: bytes, call: StreamCall) -> None:
        self._recipe = recipe
        self._prefix = name + b"/"
        self._call = call
        self._sent = (b"", 0)
        self._watch: LocalWatch | None = None
        self._error: errors.StatusError | None = None

    async def run(self) -> None:
        """Send until the call ends.

        Raises:
            StatusError: the member stops, could not confirm that its state is recent, or ``stop`` was given this error.
        """
        self._recipe.begin_wait(self.stop)
        try:
            await self._recipe.confirm()
            while True:
                await self._observe()
        finally:
            self._recipe.end_wait(self.stop)

    def stop(self, error: errors.StatusError) -> None:
        """End it with an error."""
        self._error = error
        if self._watch is not None:
            self._watch.fail(error)

    async def _observe(self) -> None:
        """Send who leads now and what follows; returns if history was compacted before it was read."""
        revision, leader = await self._recipe.oldest(self._prefix)
        await self._send(revision, leader)
        if self._error is not None:
            raise self._error
        recipe, prefix = self._recipe, self._prefix
        identity = identity_of(self._call)
        self._watch = LocalWatch(recipe.hub, prefix, prefix_end(prefix), revision + 1, recipe.soon, identity)
        try:
            await self._follow(self._watch)
        except errors.CompactedError:
            pass
        finally:
            self._watch.close()
            self._watch = None

    async def _follow(self, watch: LocalWatch) -> None:
        while True:
            response = await watch.next()
            # What is behind comes with several revisions in one response.
            for event in response.events:
                if self._may_change_leader(event.kv.key):
                    revision = event.kv.mod_revision
                    _, leader = await self._recipe.oldest(self._prefix, revision)
                    await self._send(revision, leader)

    def _may_change_leader(self, key: bytes) -> bool:
        """Return whether an event of this key matters: while somebody leads, nobody who comes or goes behind does."""
        leader, _ = self._sent
        return not leader or leader == key

    async def _send(self, revision: int, kv: kv_pb2.KeyValue | None) -> None:
        """Send who leads at a revision, unless that was sent."""
        leader = (kv.key, kv.mod_revision) if kv is not None else (b"", 0)
        if leader == self._sent:
            return
        self._sent = leader
        if kv is not None:
            await self._call.send(self._recipe.answer(revision, election_pb2.LeaderResponse(kv=kv)))
