"""The Election service: leaders of an application (etcd's v3election).

A candidate is an entry in a queue (``recipes.lock``) whose value is its proclamation; the first entry leads. The queue
of "name" has all keys below "name/".

    Campaign  wait to be first         Leader   the current first entry
    Proclaim  set a new value          Observe  the current first entry, and every change of it
    Resign    delete the entry
"""

from __future__ import annotations

import asyncio
from typing import Final

from raftkv import errors
from raftkv.pb import election_pb2, rpc_pb2
from raftkv.pb.services import SERVICES
from raftkv.replica.node.leadership import LeaderGuard
from raftkv.rpc.server.calls import ServerCall, UnaryCall
from raftkv.rpc.server.server import Server
from raftkv.rpc.server.stream import StreamCall
from raftkv.rpc.shares import identity_of, queue_of_call
from raftkv.server.recipes.local_client import Change, LocalWatch, Recipe, created_at, deletion, prefix_end
from raftkv.server.recipes.lock import LEASE_TTL_S, Queue, QueueEntry

# -- observer -------------------------------------------------------------------------------------------------------
#
# Election.Observe: the leader of an election, then every later leader and proclamation, in the order of revisions.
#
#     revision   5: a leads, value 1   7: a proclaims 2   9: a resigns, b is next   12: b resigns   15: c comes
#     sent       (a, 1)                (a, 2)             (b, its value)            nothing         (c, ...)
#
# Invariants
# - The leader at the end of each revision that changed the election is sent, so nothing is left out or sent twice,
#   however late the changes are read. (etcd reads again after each resignation, and may skip a short-lived leader.)
# - For a client that does not read, the cost is what ``LocalWatch`` keeps: no keys and no values. If the history that
#   it still needs is compacted meanwhile, it continues with the current state.
#


class Observer:
    """One stream of leaders.

    Arguments:
        recipe: reads and writes on the member.
        name: name of the election.
        call: stream that they are sent on.
    """

    def __init__(self, recipe: Recipe, name: bytes, call: StreamCall) -> None:
        self._recipe = recipe
        self._prefix = name + b"/"
        self._call = call
        self._sent: Change | None = None
        self._watch: LocalWatch | None = None
        self._error: errors.StatusError | None = None

    async def run(self) -> None:
        """Send until the call ends.

        Raises:
            StatusError: the member stops, or could not confirm that its state is recent, or ``stop`` got this error.
        """
        self._recipe.begin_wait(self.stop)
        try:
            await self._recipe.confirm(queue_of_call(self._call))
            while True:
                await self._observe()
        finally:
            self._recipe.end_wait(self.stop)

    def stop(self, error: errors.StatusError) -> None:
        """End the stream with an error."""
        self._error = error
        if self._watch is not None:
            self._watch.fail(error)

    async def _observe(self) -> None:
        """Send the current leader and its successors; returns if history was compacted before it was read."""
        revision = await self._send_leader()
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
            # The changes of a watch that is behind may have several revisions.
            for key_hash, revision in await watch.next():
                if self._may_change_leader(key_hash):
                    await self._send_leader(revision)

    def _may_change_leader(self, key_hash: int) -> bool:
        """Return whether a change of a key may matter: while there is a leader, those of other candidates do not."""
        return self._sent is None or self._sent[0] == key_hash

    async def _send_leader(self, revision: int = 0) -> int:
        """Send the leader at a revision, unless it was sent last; it is read when the client has room for it.

        Arguments:
            revision: revision to read at; 0: the current one.

        Returns:
            the current revision of the store.
        """
        while True:
            await self._call.wait_for_room()
            now, kv = await self._recipe.oldest(self._prefix, queue_of_call(self._call), revision)
            if self._call.has_room:
                break
            del kv
        sent = (hash(kv.key), kv.mod_revision) if kv is not None else None
        if sent != self._sent:
            self._sent = sent
            self._recipe.check_on(self._call, self._prefix)
            if kv is not None:
                await self._call.send(self._recipe.answer(revision or now, election_pb2.LeaderResponse(kv=kv)))
        return now


_METHODS: Final = SERVICES["v3electionpb.Election"]


class ElectionService:
    """Handlers of v3electionpb.Election.

    Arguments:
        recipe: reads and writes on the member.
        guard: ends streams that require a leader.
    """

    def __init__(self, recipe: Recipe, guard: LeaderGuard) -> None:
        self._recipe = recipe
        self._guard = guard
        self._queue = Queue(recipe)

    def register(self, server: Server) -> None:
        """Register the methods."""
        for name in ("Campaign", "Proclaim", "Leader", "Resign"):
            self._recipe.serve(server, _METHODS[name], getattr(self, name.lower()))
        server.stream(_METHODS["Observe"].path, self.observe)

    async def campaign(self, call: UnaryCall, request: election_pb2.CampaignRequest) -> bytes:
        """Wait until the candidate leads. The revision in the answer is that of the store when the wait began.

        Arguments:
            call: cancelled with its client.
            request: name, lease (0: a new one) and value.

        Raises:
            LeaseNotFoundError: there is no such lease.
            ElectionNotLeaderError: the lease ended, or the candidate's key was deleted, before it could lead.
        """
        lease_id = await self._recipe.lease(call, request.lease, LEASE_TTL_S)
        entry = await self._queue.enter(call, request.name, lease_id, request.value)
        if not entry.has_value:
            await self._proclaim_or_resign(call, entry, lease_id, request.value)
        if not entry.is_first and await self._queue.wait_turn(call, entry) is None:
            raise errors.ElectionNotLeaderError
        leader = election_pb2.LeaderKey(name=request.name, key=entry.key, rev=entry.create_revision, lease=lease_id)
        return self._recipe.answer(entry.revision, election_pb2.CampaignResponse(leader=leader))

    async def _proclaim_or_resign(self, call: UnaryCall, entry: QueueEntry, lease_id: int, value: bytes) -> None:
        """Set the value of an entry that existed before. If that is refused (lease gone, say), delete the entry."""
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
            ElectionNotLeaderError: the key is not the leader's.
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
        """Return the leader.

        Arguments:
            call: cancelled with its client.
            request: the name.

        Raises:
            ElectionNoLeaderError: there is no leader.
        """
        queue = queue_of_call(call)
        await self._recipe.confirm(queue)
        prefix = request.name + b"/"
        revision, kv = await self._recipe.oldest(prefix, queue)
        self._recipe.check_on(call, prefix)
        if kv is None:
            raise errors.ElectionNoLeaderError
        return self._recipe.answer(revision, election_pb2.LeaderResponse(kv=kv))

    async def resign(self, call: UnaryCall, request: election_pb2.ResignRequest) -> bytes:
        """Delete an entry, first or not; a missing entry is not an error.

        Arguments:
            call: cancelled with its client.
            request: the entry.
        """
        if not request.HasField("leader"):
            raise errors.MissingLeaderKeyError
        revision = await self._resign(call, request.leader.key, request.leader.rev)
        return self._recipe.answer(revision, election_pb2.ResignResponse())

    async def _resign(self, call: UnaryCall, key: bytes, create_revision: int) -> int:
        revision, _ = await self._recipe.txn(call, deletion(key, create_revision))
        return revision

    async def observe(self, call: StreamCall) -> None:
        """Send the leader, and every change of it, until the client leaves."""
        message = await call.receive()
        request: election_pb2.LeaderRequest = self._recipe.admit(call, _METHODS["Observe"], message)
        observer = Observer(self._recipe, request.name, call)
        del message, request  # the stream may last for days
        end = self._guard.until_leader_lost(call)
        end.add_done_callback(lambda end: None if end.cancelled() else _stop(observer, end))
        call.send_headers()
        try:
            with self._recipe.refusals():
                await observer.run()
        finally:
            end.cancel()


def _stop(observer: Observer, end: asyncio.Future[None]) -> None:
    """End a stream: there has been no leader for a while."""
    end.exception()  # marks the exception as retrieved: it equals the error below
    observer.stop(errors.NoLeaderError())
