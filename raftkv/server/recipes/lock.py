"""The Lock service: named locks, held by leases (etcd's v3lock).

    Lock(name, lease)  ->  key "name/<lease in hex>", once every earlier key below "name/" is gone
    Unlock(key)        ->  the key is deleted

The answer says the key's create revision: the **fencing token**. A lock alone cannot keep a holder that was paused
for longer than its lease from going on afterwards; a resource that refuses tokens below the largest it has seen can,
and so can a txn on this store that compares the create revision of the lock's key.
"""

from __future__ import annotations

from typing import Final

from raftkv import errors
from raftkv.pb import lock_pb2, rpc_pb2
from raftkv.pb.services import SERVICES
from raftkv.rpc.server.calls import UnaryCall
from raftkv.rpc.server.server import Server
from raftkv.server.recipes.local_client import Recipe
from raftkv.server.recipes.queue import Queue

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
        deletion = rpc_pb2.DeleteRangeRequest(key=request.key)
        revision, _ = await self._recipe.txn(
            call, rpc_pb2.TxnRequest(success=[rpc_pb2.RequestOp(request_delete_range=deletion)])
        )
        return self._recipe.answer(revision, lock_pb2.UnlockResponse())
