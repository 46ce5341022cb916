"""The Lock service: named locks, held by leases (etcd's v3lock).

    Lock(name, lease)  ->  key "name/<lease in hex>", once every earlier key below "name/" is gone
    Unlock(key)        ->  the key is deleted

The answer says the key's create revision: the **fencing token**. A lock alone cannot keep a holder that was paused
for longer than its lease from going on afterwards; a resource that refuses tokens below the largest it has seen can,
and so can a txn on this store that compares the create revision of the lock's key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from raftkv import errors
from raftkv.apply.applier import Outcome
from raftkv.apply.wire import MEMBER, Caller
from raftkv.pb import lock_pb2, rpc_pb2
from raftkv.pb.services import SERVICES
from raftkv.rpc.server.calls import ServerCall, UnaryCall
from raftkv.rpc.server.server import Server
from raftkv.rpc.shares import Identity, identity_of, queue_of
from raftkv.server.recipes.local_client import Recipe, created_at, deletion, prefix_end

# -- queue ----------------------------------------------------------------------------------------------------------
#
# The queue that locks and elections are made of: keys below one prefix, the oldest of which is first.
#
#     name/a (created at 5, holder)   <-  name/1f (at 7)   <-  name/b (at 9)
#                                         waits for name/a     waits for name/1f
#
# A caller adds a key named by its lease, and waits until every key that was created before is gone. Each waits for the
# one just before it alone, so that a release wakes one waiter, not all. The lease deletes the key of a client that
# dies.
#
# Invariants
# - Only an entry whose key was still there, with the same create revision, in a read that a quorum confirmed after the
#   last wait is answered to be first (etcd issue 11456: a lease can end while its owner waits for the lock).
# - A waiter whose key is gone is answered at once, not when its turn would have come (etcd lets it wait).
# - A waiter lasts through changes of the leader: it waits for changes that this member applies, and asks again if a
#   read fails.
# - A waiter that leaves deletes its key, unless that was made anew meanwhile.
#
# The create revision of an entry is the fencing token: it rises from holder to holder, so a store that refuses smaller
# numbers than it has seen is safe from a holder that was paused for longer than its lease.

NAMES_IN_A_TXN: Final = 7
"""How often the txn that makes an entry has the name of the queue (``_enter_request``)."""

_Range: Final = rpc_pb2.RangeRequest


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """A key in a queue, and what was known of it when it was made or found.

    Attributes:
        key: of the entry.
        create_revision: of the key; the fencing token.
        revision: the store's when the entry was made or found.
        value: of the key when it was made or found.
        is_first: whether no entry was before it then.
        identity: of the call that waits.
        deleter: on whose behalf it is deleted if the call ends before its turn: this member's if the call has made it.
    """

    key: bytes
    create_revision: int
    revision: int
    value: bytes
    is_first: bool
    identity: Identity
    deleter: Caller | None = MEMBER

    @property
    def prefix(self) -> bytes:
        """Return the prefix of all entries of its queue, made anew: thousands of calls may wait with long names."""
        return self.key[: self.key.rindex(b"/") + 1]


class Queue:
    """Makes entries in queues and waits for their turns.

    Arguments:
        recipe: reads and writes on the member.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    async def enter(self, call: ServerCall, name: bytes, lease_id: int, value: bytes = b"") -> QueueEntry:
        """Make an entry, or find the one that the lease has already.

        If the caller leaves meanwhile, an entry that was made is deleted.

        Arguments:
            call: on whose behalf; cancelled with its client.
            name: of the queue.
            lease_id: to which the key is attached, and after which it is named.
            value: of the key.

        Raises:
            LeaseNotFoundError: there is no such lease.
            RequestTooLargeError: the name is so long that no txn can have it as often as it must.
        """
        self._recipe.check_size(NAMES_IN_A_TXN * len(name) + len(value))  # before as many copies are made
        identity = identity_of(call)
        await self._recipe.begin(name, queue_of(identity))
        prefix = name + b"/"
        key = prefix + b"%x" % lease_id

        def undo(outcome: Outcome) -> None:
            # Without an answer it may have been made: it was, if the key is of this very revision.
            is_unanswered = outcome.unanswered is not None
            if outcome.error is None and (is_unanswered or rpc_pb2.TxnResponse.FromString(outcome.body).succeeded):
                self._recipe.delete_if_same(key, outcome.revision, identity)

        revision, response = await self._recipe.txn(call, _enter_request(prefix, key, lease_id, value), undo)
        owner = response.responses[1].response_range.kvs[0]
        if response.succeeded:
            return QueueEntry(key, revision, revision, value, owner.create_revision == revision, identity)
        found = response.responses[0].response_range.kvs[0]
        is_first = owner.create_revision == found.create_revision
        return QueueEntry(key, found.create_revision, revision, found.value, is_first, identity, call.caller)

    async def wait_turn(self, entry: QueueEntry) -> int | None:
        """Wait until no entry is before this one; the revision at which that was confirmed, None if this entry is lost.

        If the caller leaves meanwhile the entry is deleted, so that no caller waits for it; one that was found only if
        the caller may still delete it.

        Raises:
            StoppedError: the member stops.
        """
        try:
            return await self._wait_turn(entry)
        except BaseException:
            self._recipe.delete_if_same(entry.key, entry.create_revision, entry.identity, entry.deleter)
            raise

    async def _wait_turn(self, entry: QueueEntry) -> int | None:
        while self._has(entry):
            ahead = await self._just_before(entry)
            if ahead is not None:
                # Finding it may have taken a while, in which neither was waited for.
                if self._has(entry) and self._is_ahead(ahead, entry):
                    await self._recipe.changed(ahead, entry.key)
            elif await self._is_confirmed(queue_of(entry.identity)):
                return self._recipe.store.revision if self._has(entry) else None
        return None

    async def _is_confirmed(self, queue: Identity) -> bool:
        """Return whether a read was confirmed; if not, the leader was lost, and another will be found."""
        try:
            await self._recipe.confirm(queue)
        except errors.StoppedError:
            raise
        except errors.StatusError:
            return False
        return True

    def _has(self, entry: QueueEntry) -> bool:
        """Return whether the entry is still the one that was made, in the state applied here."""
        kvs = self._recipe.find(_Range(key=entry.key))
        return bool(kvs) and kvs[0].create_revision == entry.create_revision

    def _is_ahead(self, key: bytes, entry: QueueEntry) -> bool:
        """Return whether a key is there that is older than the entry, in the state applied here."""
        kvs = self._recipe.find(_Range(key=key, keys_only=True))
        return bool(kvs) and kvs[0].create_revision < entry.create_revision

    async def _just_before(self, entry: QueueEntry) -> bytes | None:
        """Return the youngest key that is older."""
        prefix = entry.prefix
        request = _Range(
            key=prefix,
            range_end=prefix_end(prefix),
            max_create_revision=entry.create_revision - 1,
            sort_target=_Range.CREATE,
            sort_order=_Range.DESCEND,
            limit=1,
            keys_only=True,
        )
        _, kvs = await self._recipe.find_all(request, queue_of(entry.identity))
        return next((kv.key for kv in kvs), None)


def _enter_request(prefix: bytes, key: bytes, lease_id: int, value: bytes) -> rpc_pb2.TxnRequest:
    """Make the key unless it is there, and in the same step see who is first.

    Filled in where it is, as a part that is put into a message is copied: names may have hundreds of kilobytes.
    """
    request = rpc_pb2.TxnRequest()
    request.compare.append(created_at(key, 0))
    put = request.success.add().request_put
    put.key, put.value, put.lease = key, value, lease_id
    request.failure.add().request_range.key = key
    for branch in (request.success, request.failure):
        first = branch.add().request_range
        first.key, first.range_end = prefix, prefix_end(prefix)
        first.sort_target, first.sort_order = _Range.CREATE, _Range.ASCEND
        first.limit, first.keys_only = 1, True
    return request


_METHODS: Final = SERVICES["v3lockpb.Lock"]
LEASE_TTL_S: Final = 60
"""TTL of the lease that a caller without one is given; it is not kept alive."""


class LockService:
    """Handlers of v3lockpb.Lock.

    Arguments:
        recipe: reads and writes on the member.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._queue = Queue(recipe)

    def register(self, server: Server) -> None:
        """Serve the methods."""
        self._recipe.serve(server, _METHODS["Lock"], self.lock)
        self._recipe.serve(server, _METHODS["Unlock"], self.unlock)

    async def lock(self, call: UnaryCall, request: lock_pb2.LockRequest) -> bytes:
        """Wait until the lock is the lease's.

        Arguments:
            call: cancelled with its client.
            request: name, and lease (0: a new one).

        Raises:
            LeaseNotFoundError: there is no such lease.
            SessionExpiredError: it ended, or the waiter's key was deleted, before the lock was free.
        """
        lease_id = await self._recipe.lease(call, request.lease, LEASE_TTL_S)
        entry = await self._queue.enter(call, request.name, lease_id)
        revision = entry.revision if entry.is_first else await self._queue.wait_turn(entry)
        if revision is None:
            raise errors.SessionExpiredError
        return self._recipe.answer(
            revision, lock_pb2.LockResponse(key=entry.key, create_revision=entry.create_revision)
        )

    async def unlock(self, call: UnaryCall, request: lock_pb2.UnlockRequest) -> bytes:
        """Delete a key; one that is missing is as good.

        Arguments:
            call: cancelled with its client.
            request: the key.
        """
        revision, _ = await self._recipe.txn(call, deletion(request.key))
        return self._recipe.answer(revision, lock_pb2.UnlockResponse())
