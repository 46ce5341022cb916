"""The Lock service: named locks, held by leases (etcd's v3lock).

    Lock(name, lease)  ->  key "name/<lease in hex>", once every earlier key below "name/" is gone
    Unlock(key)        ->  the key is deleted

The answer contains the key's create revision: the **fencing token**. A lock alone cannot stop a holder that was paused
for longer than its lease from continuing afterwards. A resource that refuses tokens smaller than the largest it has
seen can, and so can a transaction on this store that compares the create revision of the lock's key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from weakref import WeakValueDictionary

from raftkv import errors
from raftkv.apply import check
from raftkv.apply.applier import Outcome
from raftkv.apply.wire import MEMBER, Caller, Kind
from raftkv.pb import lock_pb2, rpc_pb2
from raftkv.pb.services import SERVICES
from raftkv.replica.node.proposals import Waiter
from raftkv.rpc.server.calls import ServerCall, UnaryCall
from raftkv.rpc.server.server import Server
from raftkv.rpc.shares import Identity, identity_of, queue_of
from raftkv.rpc.status import RpcError
from raftkv.server.recipes.local_client import Recipe, created_at, prefix_end, refusal
from raftkv.server.services.responder import Responder

# -- queue ----------------------------------------------------------------------------------------------------------
#
# The queue behind locks and elections: keys below one prefix, of which the oldest is first.
#
#     name/a (created at 5, holder)   <-  name/1f (at 7)   <-  name/b (at 9)
#                                         waits for name/a     waits for name/1f
#
# A caller adds a key named by its lease, and waits until every key created before it is gone. Each caller waits only
# for its predecessor, so a release wakes one waiter, not all. When a client dies, its lease deletes its key.
#
# Invariants
# - An entry is reported as first only if its key still existed, with the same create revision, in a quorum-confirmed
#   read after the last wait (etcd issue 11456: a lease can end while its owner waits for the lock).
# - A waiter whose key is gone is answered at once, not when its turn would have come (etcd lets it wait).
# - A waiter survives changes of the leader: it waits for changes applied on this member, and repeats a failed read.
# - A waiter that leaves deletes its key, unless the key was created again meanwhile.
#
# The create revision of an entry is the fencing token: it rises from holder to holder, so a store that refuses smaller
# numbers than it has seen is safe from a holder that was paused for longer than its lease.

NAMES_IN_A_TXN: Final = 7
"""How often the transaction that creates an entry contains the name of the queue (``_enter_request``)."""

_Range: Final = rpc_pb2.RangeRequest


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """A key in a queue, and its state when it was created or found.

    Attributes:
        key: key of the entry.
        create_revision: create revision of the key; the fencing token.
        revision: revision of the store when the entry was created or found.
        has_value: whether the key had the requested value then.
        is_first: whether no entry was before it then.
        identity: identity of the waiting call.
        deleter: caller in whose name the key is deleted if the call ends before its turn: this member if the call has
            created the key.
    """

    key: bytes
    create_revision: int
    revision: int
    has_value: bool
    is_first: bool
    identity: Identity
    deleter: Caller | None = MEMBER

    @property
    def prefix(self) -> bytes:
        """The prefix of the queue's keys; not stored, since thousands of calls may wait with long names."""
        return self.key[: self.key.rindex(b"/") + 1]


class _Ahead:
    """A key that waiters wait for: any client may write one below a prefix, it may be long, and thousands may wait."""

    __slots__ = ("__weakref__", "key")

    def __init__(self, key: bytes) -> None:
        self.key = key


class Queue:
    """Creates entries in queues, and waits for their turns.

    Arguments:
        recipe: reads and writes on the member.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._waited_for: WeakValueDictionary[bytes, _Ahead] = WeakValueDictionary()

    async def enter(self, call: ServerCall, name: bytes, lease_id: int, value: bytes = b"") -> QueueEntry:
        """Create an entry, or find the entry that the lease already has.

        If the caller leaves meanwhile, a created entry is deleted.

        Arguments:
            call: call of the caller; cancelled with its client.
            name: name of the queue.
            lease_id: lease of the key, which is also its name.
            value: value of the key.

        Raises:
            LeaseNotFoundError: there is no such lease.
            RequestTooLargeError: the name is too long for the transaction that creates an entry.
        """
        # Before the name is copied that often.
        self._recipe.responder.admission.check_size(NAMES_IN_A_TXN * len(name) + len(value))
        identity = identity_of(call)
        await self._recipe.begin(name, queue_of(identity))
        prefix = name + b"/"
        key = prefix + b"%x" % lease_id

        def undo(outcome: Outcome) -> None:
            if outcome.error is None and rpc_pb2.TxnResponse.FromString(outcome.body).succeeded:
                self._recipe.delete_if_same(key, outcome.revision, identity)

        revision, response = await self._recipe.txn(call, _enter_request(prefix, key, lease_id, value), undo)
        owner = response.responses[1].response_range.kvs[0]
        if response.succeeded:
            return QueueEntry(key, revision, revision, True, owner.create_revision == revision, identity)
        found = response.responses[0].response_range.kvs[0]
        is_first = owner.create_revision == found.create_revision
        return QueueEntry(key, found.create_revision, revision, found.value == value, is_first, identity, call.caller)

    async def wait_turn(self, call: ServerCall, entry: QueueEntry) -> int | None:
        """Wait until no entry is before this one. Returns the revision that confirms it; None: this entry is lost.

        If the caller leaves meanwhile, or loses its right, the entry is deleted, so that no other caller waits for it.
        An entry that was found, not created, is deleted only if the caller may still do so.

        Raises:
            StoppedError: the member stops.
            StatusError: as in ``Rights``.
        """
        try:
            revision = await self._wait_turn(entry)
            self._recipe.check_on(call, entry.prefix, entry.key)
            return revision
        except BaseException:
            self._recipe.delete_if_same(entry.key, entry.create_revision, entry.identity, entry.deleter)
            raise

    async def _wait_turn(self, entry: QueueEntry) -> int | None:
        while self._has(entry):
            ahead = await self._just_before(entry)
            if ahead is not None:
                # The search may have taken time in which neither key was watched.
                if self._has(entry) and self._is_ahead(ahead.key, entry):
                    await self._recipe.changed(ahead.key, entry.key)
            elif await self._is_confirmed(queue_of(entry.identity)):
                return self._recipe.store.revision if self._has(entry) else None
        return None

    async def _is_confirmed(self, queue: Identity) -> bool:
        """Return whether a read was confirmed; if not, the leader was lost, and there will be another."""
        try:
            await self._recipe.confirm(queue)
        except errors.StoppedError:
            raise
        except errors.StatusError:
            return False
        return True

    def _has(self, entry: QueueEntry) -> bool:
        """Return whether the entry still exists unchanged in the state applied here."""
        kvs = self._recipe.find(_Range(key=entry.key))
        return bool(kvs) and kvs[0].create_revision == entry.create_revision

    def _is_ahead(self, key: bytes, entry: QueueEntry) -> bool:
        """Return whether an older key still exists in the state applied here."""
        kvs = self._recipe.find(_Range(key=key, keys_only=True))
        return bool(kvs) and kvs[0].create_revision < entry.create_revision

    async def _just_before(self, entry: QueueEntry) -> _Ahead | None:
        """Return the youngest of the older keys, as one object for all that wait for it."""
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
        return self._waited_for.setdefault(kvs[0].key, _Ahead(kvs[0].key)) if kvs else None


def _enter_request(prefix: bytes, key: bytes, lease_id: int, value: bytes) -> rpc_pb2.TxnRequest:
    """Return the transaction that creates the key unless it exists, and in the same step finds the first entry.

    Parts are filled in place, since adding a part to a message copies it: names may have hundreds of kilobytes.
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
"""TTL of a lease granted to a caller without one; it is not kept alive."""


class LockService:
    """Handlers of v3lockpb.Lock.

    Arguments:
        recipe: reads and writes on the member.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._queue = Queue(recipe)

    def register(self, server: Server) -> None:
        """Register the methods."""
        self._recipe.serve(server, _METHODS["Lock"], self.lock)
        server.unary(_METHODS["Unlock"].path, self.unlock)

    async def lock(self, call: UnaryCall, request: lock_pb2.LockRequest) -> bytes:
        """Wait until the lease has the lock.

        Arguments:
            call: cancelled with its client.
            request: name, and lease (0: a new one).

        Raises:
            LeaseNotFoundError: there is no such lease.
            SessionExpiredError: the lease ended, or the waiter's key was deleted, before the lock was free.
        """
        lease_id = await self._recipe.lease(call, request.lease, LEASE_TTL_S)
        entry = await self._queue.enter(call, request.name, lease_id)
        revision = entry.revision if entry.is_first else await self._queue.wait_turn(call, entry)
        if revision is None:
            raise errors.SessionExpiredError
        return self._recipe.answer(
            revision, lock_pb2.LockResponse(key=entry.key, create_revision=entry.create_revision)
        )

    def unlock(self, call: UnaryCall, data: bytes) -> None:
        """Delete a key; a missing key is not an error."""
        responder = self._recipe.responder
        try:
            request = self._recipe.admit(call, _METHODS["Unlock"], data)
            delete = rpc_pb2.DeleteRangeRequest(key=request.key)
            body, waiter = delete.SerializeToString(), _Unlocking(responder, call, delete)
            with self._recipe.refusals():
                check.check_delete_range(delete)
                responder.admission.check_write(call, Kind.DELETE_RANGE, body, delete)
                waiter.request_id = responder.node.submit(Kind.DELETE_RANGE, body, waiter, call.caller)
        except RpcError as error:
            call.fail_with(error)
        else:
            call.on_cancel(waiter.cancel)


class _Unlocking(Waiter):
    """Answers Unlock with the outcome of its deletion."""

    __slots__ = ("_call", "_responder", "request_id")

    def __init__(self, responder: Responder, call: UnaryCall, request: rpc_pb2.DeleteRangeRequest) -> None:
        super().__init__(request, call.identity, call.deadline)
        self._responder = responder
        self._call = call
        self.request_id = 0

    @property
    def is_over(self) -> bool:
        return self._call.cancelled

    def cancel(self) -> None:
        """Withdraw the deletion, unless it is in progress: the client has left."""
        self._responder.node.withdraw(self.request_id)

    def finish(self, outcome: Outcome) -> None:
        if outcome.error is not None:
            self.fail(outcome.error)
        else:
            self._responder.reply(self._call, outcome.revision)

    def fail(self, error: errors.StatusError) -> None:
        self._call.fail_with(refusal(error))
