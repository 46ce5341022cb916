"""The Election service: who leads something of the application's (etcd's v3election).

A candidate is an entry in a queue (``recipes.queue``) whose value is what it proclaims; the first leads. The queue of
"name" is all keys below "name/".

    Campaign  waits to be first        Leader   who is first now
    Proclaim  a new value, if first    Observe  who is first now, and every change of that
    Resign    deletes the entry
"""

from __future__ import annotations

import asyncio
from typing import Final

from raftkv import errors
from raftkv.pb import election_pb2, rpc_pb2
from raftkv.pb.services import SERVICES
from raftkv.rpc.server.calls import ServerCall, UnaryCall
from raftkv.rpc.server.server import Server
from raftkv.rpc.server.stream import StreamCall
from raftkv.server.recipes.local_client import Recipe, created_at, refusal
from raftkv.server.recipes.lock import LEASE_TTL_S
from raftkv.server.recipes.observer import Observer
from raftkv.server.recipes.queue import Queue, QueueEntry
from raftkv.server.services.leader_guard import LeaderGuard

_METHODS: Final = SERVICES["v3electionpb.Election"]


class ElectionService:
    """Handlers of v3electionpb.Election.

    Arguments:
        recipe: reads and writes on the member.
        guard: ends streams that insist on a leader.
    """

    def __init__(self, recipe: Recipe, guard: LeaderGuard) -> None:
        self._recipe = recipe
        self._guard = guard
        self._queue = Queue(recipe)

    def register(self, server: Server) -> None:
        """Serve the methods."""
        self._recipe.serve(server, _METHODS["Campaign"], self.campaign)
        self._recipe.serve(server, _METHODS["Proclaim"], self.proclaim)
        self._recipe.serve(server, _METHODS["Leader"], self.leader)
        self._recipe.serve(server, _METHODS["Resign"], self.resign)
        server.stream(_METHODS["Observe"].path, self.observe)

    async def campaign(self, call: UnaryCall, request: election_pb2.CampaignRequest) -> bytes:
        """Wait until the candidate leads. The answer's revision is the store's when it began to wait.

        Arguments:
            call: cancelled with its client.
            request: name, lease (0: a new one) and value.

        Raises:
            LeaseNotFoundError: there is no such lease.
            ElectionNotLeaderError: the lease ended, or the candidate's key was deleted, before it led.
        """
        lease_id = await self._recipe.lease(call, request.lease, LEASE_TTL_S)
        entry = await self._queue.enter(call, request.name, lease_id, request.value)
        if entry.value != request.value:
            await self._proclaim_or_resign(call, entry, lease_id, request.value)
        if not entry.is_first and await self._queue.wait_turn(entry) is None:
            raise errors.ElectionNotLeaderError
        leader = election_pb2.LeaderKey(name=request.name, key=entry.key, rev=entry.create_revision, lease=lease_id)
        return self._recipe.answer(entry.revision, election_pb2.CampaignResponse(leader=leader))

    async def _proclaim_or_resign(self, call: UnaryCall, entry: QueueEntry, lease_id: int, value: bytes) -> None:
        """Give an entry that was found the new value. Who is refused that (the lease is gone, say) loses the entry."""
        try:
            await self._proclaim(call, entry.key, entry.create_revision, lease_id, value)
        except errors.StatusError as error:
            if error.definite:
                await self._resign(call, entry.key, entry.create_revision)
            raise

    async def proclaim(self, call: UnaryCall, request: election_pb2.ProclaimRequest) -> bytes:
        """Change the leader's value.

        Arguments:
            call: cancelled with its client.
            request: the leader's key, and its new value.

        Raises:
            ElectionNotLeaderError: the key is not that leader's.
        """
        leader = await self._leader_key(call, request)
        revision = await self._proclaim(call, leader.key, leader.rev, leader.lease, request.value)
        return self._recipe.answer(revision, election_pb2.ProclaimResponse())

    async def _leader_key(self, call: UnaryCall, request: election_pb2.ProclaimRequest) -> election_pb2.LeaderKey:
        if not request.HasField("leader"):
            raise errors.MissingLeaderKeyError
        leader = election_pb2.LeaderKey()
        leader.CopyFrom(request.leader)
        leader.lease = await self._recipe.lease(call, leader.lease, LEASE_TTL_S)
        return leader

    async def _proclaim(self, call: ServerCall, key: bytes, create_revision: int, lease_id: int, value: bytes) -> int:
        put = rpc_pb2.PutRequest(key=key, value=value, lease=lease_id)
        revision, response = await self._recipe.txn(
            call,
            rpc_pb2.TxnRequest(
                compare=[created_at(key, create_revision)], success=[rpc_pb2.RequestOp(request_put=put)]
            ),
        )
        if not response.succeeded:
            raise errors.ElectionNotLeaderError
        return revision

    async def leader(self, call: UnaryCall, request: election_pb2.LeaderRequest) -> bytes:
        """Return who leads.

        Arguments:
            call: cancelled with its client.
            request: the name.

        Raises:
            ElectionNoLeaderError: nobody does.
        """
        await self._recipe.confirm()
        revision, kv = await self._recipe.oldest(request.name + b"/")
        if kv is None:
            raise errors.ElectionNoLeaderError
        return self._recipe.answer(revision, election_pb2.LeaderResponse(kv=kv))

    async def resign(self, call: UnaryCall, request: election_pb2.ResignRequest) -> bytes:
        """Delete an entry, first or not; one that is gone already is as good.

        Arguments:
            call: cancelled with its client.
            request: the entry.
        """
        if not request.HasField("leader"):
            raise errors.MissingLeaderKeyError
        revision = await self._resign(call, request.leader.key, request.leader.rev)
        return self._recipe.answer(revision, election_pb2.ResignResponse())

    async def _resign(self, call: UnaryCall, key: bytes, create_revision: int) -> int:
        deletion = rpc_pb2.RequestOp(request_delete_range=rpc_pb2.DeleteRangeRequest(key=key))
        request = rpc_pb2.TxnRequest(compare=[created_at(key, create_revision)], success=[deletion])
        revision, _ = await self._recipe.txn(call, request)
        return revision

    async def observe(self, call: StreamCall) -> None:
        """Send who leads, and every change of that, until the client goes."""
        message = await call.receive()
        request: election_pb2.LeaderRequest = self._recipe.admit(call, _METHODS["Observe"], message)
        observer = Observer(self._recipe, request.name, call)
        del message, request  # the stream may last for days
        end = self._guard.until_leader_lost(call)
        end.add_done_callback(lambda end: None if end.cancelled() else _stop(observer, end))
        call.send_headers()
        try:
            await observer.run()
        except errors.StatusError as error:
            raise refusal(error) from None
        except errors.CorruptionError as error:
            self._recipe.responder.node.damaged(error)
            raise refusal(errors.DamagedError()) from None
        except errors.InvariantError as error:
            self._recipe.responder.node.fatal(error)
            raise
        finally:
            end.cancel()


def _stop(observer: Observer, end: asyncio.Future[None]) -> None:
    """There has been no leader for a while."""
    end.exception()  # taken note of: it says the same as the error below
    observer.stop(errors.NoLeaderError())
