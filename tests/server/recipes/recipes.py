"""The Lock and Election services on a member reduced to a store: entries and reads complete on command.

member = RecipeMember(leases=(10, 11))
waiting = member.lock(b"n", 11)          # a task, already at its first wait
await member.settle()                    # apply what was proposed, confirm reads, deliver changes, until quiet
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast

from raftkv import errors
from raftkv.apply.applier import Applier, Outcome
from raftkv.apply.wire import HeaderEncoder, Kind
from raftkv.loop.cork import Cork
from raftkv.pb import election_pb2, lock_pb2, rpc_pb2
from raftkv.replica.node.admission import Admission
from raftkv.replica.node.leadership import LeaderGuard
from raftkv.replica.node.node import Node
from raftkv.replica.node.proposals import Waiter
from raftkv.replica.node.reads import Reader
from raftkv.replica.node.waits import AwaitableNode
from raftkv.replica.watch.hub import WatchHub
from raftkv.rpc.server.calls import UnaryCall
from raftkv.rpc.server.stream import StreamCall
from raftkv.rpc.shares import Uses
from raftkv.rpc.status import RpcError
from raftkv.server.recipes.election import ElectionService
from raftkv.server.recipes.local_client import Recipe
from raftkv.server.recipes.lock import LockService
from raftkv.server.services.responder import Responder
from raftkv.storage.selection import finish
from tests.apply.machine import Machine

TURNS_MAX = 1_000
CALL = cast(UnaryCall, SimpleNamespace(deadline=None, caller=None))
"""Recipes only hand the call to admission."""


class Granted:
    """Leases that exist, granted in order from 1000 on."""

    def __init__(self, *ids: int) -> None:
        self.ids = set(ids)

    def exists(self, lease_id: int) -> bool:
        """Whether a key may be attached to it."""
        return lease_id in self.ids

    async def grant(self, ttl_s: int, caller: object, identity: object) -> int:
        """Grant the next."""
        lease_id = 1_000 + len(self.ids)
        self.ids.add(lease_id)
        return lease_id


class ManualNode(AwaitableNode):
    """Keeps proposals and reads until the test says what becomes of them."""

    def __init__(self) -> None:
        self.term = 3
        self.proposed: list[tuple[int, bytes, Waiter]] = []
        self.reading: list[Reader] = []
        self.stopped = False

    def submit(self, kind: int, body: bytes, waiter: Waiter, caller: object) -> int:
        """See ``Node``."""
        if self.stopped:
            raise errors.StoppedError
        self.proposed.append((kind, body, waiter))
        return 1

    def read(self, reader: Reader, staleness_s_max: float | None = None) -> None:
        """See ``Node``."""
        if self.stopped:
            raise errors.StoppedError
        self.reading.append(reader)

    def withdraw(self, request_id: int, *, only_unsent: bool = False) -> bool:
        """Withdraw nothing: all that was proposed is under way."""
        return False


SIZE_MAX_BYTES = 1536 * 1024


class NoAdmission:
    """Admits everything that is not too large."""

    throttle = None

    def check_read(self, call: object, serializable: bool) -> None:
        """See ``Admission``."""

    def check_bounded_read(self, call: object, serializable: bool, request: object = None) -> None:
        """See ``Admission``."""

    def check_write(self, call: object, kind: int, data: bytes, request: Any) -> None:
        """Let all in, as ``Admission`` may: the size was checked where the request was made."""
        assert len(data) <= SIZE_MAX_BYTES

    def check_size(self, size_bytes: int) -> None:
        """See ``Admission``."""
        if size_bytes > SIZE_MAX_BYTES:
            raise errors.RequestTooLargeError


class RecipeMember:
    """A store with the recipes on it; nothing happens but by ``settle`` or one of its parts."""

    def __init__(self, *leases: int) -> None:
        machine = Machine()
        self.store = machine.store
        self.leases = Granted(*leases)
        self.applier = Applier(machine.store, machine.alarms, machine.membership, self.leases)
        self.node = ManualNode()
        header = HeaderEncoder(1, 2)
        self.hub = WatchHub(self.store, lambda revision: header.encode(revision, 3), self._wake, Cork())
        self.store.on_changes = self.hub.changed
        self._behind = False
        responder = Responder(
            cast(Node, self.node), self.applier, header, cast(Admission, NoAdmission()), lambda needed: None, Uses()
        )
        self.recipe = Recipe(responder, self.hub, self.leases)
        self.guard = NoGuard()
        self.locks = LockService(self.recipe)
        self.elections = ElectionService(self.recipe, cast(LeaderGuard, self.guard))

    # -- what happens ------------------------------------------------------------------------------------------------

    def apply(self) -> None:
        """Apply everything proposed, answer, then deliver the changes, as a turn of a member does."""
        proposed, self.node.proposed = self.node.proposed, []
        outcomes: list[tuple[Waiter, Outcome]] = []
        for kind, body, waiter in proposed:
            outcome = self.applier.begin(kind, body)
            outcomes.append((waiter, outcome if isinstance(outcome, Outcome) else finish(outcome)))
        for waiter, outcome in outcomes:
            waiter.finish(outcome)
        self.hub.applied()

    def confirm_reads(self) -> None:
        """A quorum confirms every read that waits."""
        reading, self.node.reading = self.node.reading, []
        for reader in reading:
            reader.ready()

    def fail_reads(self, error: errors.StatusError) -> None:
        """The reads that wait are lost with their leader."""
        reading, self.node.reading = self.node.reading, []
        for reader in reading:
            reader.fail(error)

    def _wake(self) -> None:
        self._behind = True

    def catch_up(self) -> None:
        """Serve watches that are behind."""
        while self._behind:
            self._behind = self.hub.catch_up()

    async def settle(self) -> None:
        """Go on until there are no more proposals and reads."""
        for _ in range(TURNS_MAX):
            await quiet()
            is_reading = self.node.reading or len(self.recipe.responder.slices)
            if not self.node.proposed and not is_reading and not self._behind:
                return
            self.catch_up()
            self.apply()
            self.confirm_reads()
        raise AssertionError("the recipes never come to rest")

    def write(self, **operation: Any) -> int:
        """Apply one operation of another client at once; the revision after it."""
        request = rpc_pb2.TxnRequest(success=[rpc_pb2.RequestOp(**operation)])
        outcome = self.applier.apply(Kind.TXN, request.SerializeToString())
        assert outcome.error is None, outcome.error
        self.hub.applied()
        return outcome.revision

    def put(self, key: bytes, value: bytes = b"", lease: int = 0) -> int:
        """Put a key; the revision."""
        return self.write(request_put=rpc_pb2.PutRequest(key=key, value=value, lease=lease))

    def delete(self, key: bytes) -> int:
        """Delete a key; the revision after it."""
        return self.write(request_delete_range=rpc_pb2.DeleteRangeRequest(key=key))

    def keys(self) -> list[bytes]:
        """All keys."""
        return [kv.key for kv in self.recipe.find(rpc_pb2.RangeRequest(key=b"\0", range_end=b"\0"))]

    # -- what is asked -----------------------------------------------------------------------------------------------

    def lock(self, name: bytes, lease: int) -> asyncio.Task[lock_pb2.LockResponse]:
        """Begin to lock."""
        return _task(self.locks.lock(CALL, lock_pb2.LockRequest(name=name, lease=lease)), lock_pb2.LockResponse)

    def campaign(self, name: bytes, lease: int, value: bytes) -> asyncio.Task[election_pb2.CampaignResponse]:
        """Begin to campaign."""
        request = election_pb2.CampaignRequest(name=name, lease=lease, value=value)
        return _task(self.elections.campaign(CALL, request), election_pb2.CampaignResponse)

    def proclaim(
        self, leader: election_pb2.LeaderKey | None, value: bytes
    ) -> asyncio.Task[election_pb2.ProclaimResponse]:
        """Begin to proclaim."""
        request = election_pb2.ProclaimRequest(leader=leader, value=value)
        return _task(self.elections.proclaim(CALL, request), election_pb2.ProclaimResponse)

    def resign(self, leader: election_pb2.LeaderKey | None) -> asyncio.Task[election_pb2.ResignResponse]:
        """Begin to resign."""
        request = election_pb2.ResignRequest(leader=leader)
        return _task(self.elections.resign(CALL, request), election_pb2.ResignResponse)

    def leader(self, name: bytes) -> asyncio.Task[election_pb2.LeaderResponse]:
        """Ask who leads."""
        request = election_pb2.LeaderRequest(name=name)
        return _task(self.elections.leader(CALL, request), election_pb2.LeaderResponse)

    def observe(self, name: bytes) -> tuple[Spectator, asyncio.Task[None]]:
        """Begin to observe."""
        spectator = Spectator(election_pb2.LeaderRequest(name=name))
        observing = self.elections.observe(cast(StreamCall, spectator))
        return spectator, asyncio.get_running_loop().create_task(observing)


class Spectator:
    """A stream call as Observe sees it, and what was sent on it; it takes messages only while it reads."""

    headers = ()

    def __init__(self, request: election_pb2.LeaderRequest) -> None:
        self.sent: list[tuple[int, bytes, bytes]] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self._request = request.SerializeToString()

    async def receive(self) -> bytes:
        """The request."""
        return self._request

    def send_headers(self) -> None:
        """See ``StreamCall``."""

    @property
    def has_room(self) -> bool:
        """Return whether the client reads."""
        return self.reads.is_set()

    async def wait_for_room(self) -> None:
        """Wait until the client reads."""
        await self.reads.wait()

    async def send(self, message: bytes) -> None:
        """Note revision, key and value of a leader."""
        await self.reads.wait()
        response = election_pb2.LeaderResponse.FromString(message)
        self.sent.append((response.header.revision, response.kv.key, response.kv.value))


class NoGuard:
    """The guard of a member that always has a leader; ``lose_leader`` ends that."""

    def __init__(self) -> None:
        self._end: asyncio.Future[None] | None = None

    def until_leader_lost(self, call: object) -> asyncio.Future[None]:
        """See ``LeaderGuard``."""
        self._end = asyncio.get_running_loop().create_future()
        return self._end

    def lose_leader(self) -> None:
        """There has been no leader for a while."""
        if self._end is not None:
            self._end.set_exception(RpcError(errors.UNAVAILABLE, "etcdserver: no leader"))


def _task(handler: Coroutine[Any, Any, bytes], message: type[Any]) -> asyncio.Task[Any]:
    async def parsed() -> Any:
        return message.FromString(await handler)

    return asyncio.get_running_loop().create_task(parsed())


async def quiet() -> None:
    """Let every task go as far as it gets by itself."""
    for _ in range(20):
        await asyncio.sleep(0)
