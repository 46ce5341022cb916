"""Whole members without sockets, on virtual time: the production replica, the guard and all services of clients.

world = Members(3)
world.user("alice", ("READWRITE", b"a", b"b"))
world.enable()
call = world.start("etcdserverpb.KV/Put", request, world.token("alice"), at=1)   # 0: the leader
world.wait(0.1)                                                                  # seconds of virtual time
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar, cast

from raftkv.apply.wire import MEMBER
from raftkv.config import ServerConfig
from raftkv.replica.replica import Replica
from raftkv.server.auth.simple_tokens import digest_of
from raftkv.server.auth.users import Users
from raftkv.server.maintenance.quotas import QuotaService
from raftkv.server.maintenance.service import MaintenanceService
from raftkv.server.peer.service import PeerService
from raftkv.server.recipes.election import ElectionService
from raftkv.server.recipes.local_client import Recipe
from raftkv.server.recipes.lock import LockService
from raftkv.server.services.cluster import ClusterService
from raftkv.server.services.kv import KVService
from raftkv.server.services.range_stream import RangeStreamService
from raftkv.server.services.responder import Responder
from raftkv.server.streams.lease import LeaseService
from raftkv.server.streams.watch import WatchService
from tests.server.auth.world import PASSWORD_COST, Call, Registry, World
from tests.sim.assembly import CLUSTER_ID
from tests.sim.clients.users import Unheard
from tests.sim.cluster import Cluster, ClusterParameters
from tests.sim.devices.calls import Handlers
from tests.sim.journal import stream
from tests.sim.member import Member

T = TypeVar("T")


class Unchecked:
    """Checkers that check nothing: entries of users and quotas are unknown to the replay of the simulator."""

    violation = None

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class _Served(Member):
    """A simulated member with the services and the guard of the client ports."""

    def _serve(self, replica: Replica) -> None:
        node, guard = replica.node, replica.leader_guard
        responder = Responder(
            node, replica.applier, replica.header, replica.admission, replica.versions.check_capable, node.uses
        )
        self.users = Users(ServerConfig(bcrypt_cost=PASSWORD_COST), replica.applier, node, responder.slices)
        self.registry = Registry(self.users.guard.around)
        server, live = cast(Any, self.registry), self.users.live
        recipe = Recipe(responder, replica.hub, replica.lessor)
        leases = LeaseService(responder, replica.lessor, guard, self.cork, live)
        watches = WatchService(
            replica.hub, replica.admission, guard, live, fragment_bytes=1 << 20, progress_interval_s=600
        )
        members = ClusterService(responder, replica.changes)
        for service in (
            KVService(responder, 128),
            RangeStreamService(responder, 1 << 20),
            *(watches, leases, LockService(recipe), ElectionService(recipe, guard), members),
            MaintenanceService(responder, replica.store, 0, replica.defragmenter, replica.hashes),
            QuotaService(responder),
        ):
            service.register(server)
        self.users.serve(server, responder)
        self.handlers = Handlers()
        nothing: Any = None
        for_members = {**leases.for_members(), **members.for_members()}
        PeerService(
            CLUSTER_ID, self.id, replica.membership, node.receive, nothing, for_members, nothing
        ).register(cast(Any, self.handlers))  # fmt: skip
        replica.connect(graces=leases.graces, check_rights=live.applied, forget_tokens=self.users.tokens.forget_all)
        replica.start()
        self.loop.create_task(replica.housekeeping.run())
        self.loop.create_task(self._serve_clients())


class _Cluster(Cluster):
    """A cluster of such members."""

    def _boot(self, voters: tuple[int, ...]) -> None:
        self.checkers = cast(Any, Unchecked())
        super()._boot(voters)

    def _make(self, id: int) -> Member:
        member = self.members[id] = _Served(self, id, stream(self.seed, f"member {id}"), self.parameters.member.tick_s)
        return member


class Members(World):
    """Holds members on virtual time, and calls them as their clients would.

    Attributes:
        members: the leader, and the others.
    """

    def __init__(self, count: int = 1) -> None:
        self._tokens = 0
        self.cluster = _Cluster(0, ClusterParameters(count, is_managed=True))
        self.wait(5.0)
        found = cast(list[_Served], list(self.cluster.members.values()))
        self.members = sorted(found, key=lambda member: not member.is_leader())
        leader = self.members[0]
        self.node, self.replica = cast(Any, leader.node), leader.replica
        self.applier, self.users = leader.applier, leader.users
        self.auth = self.applier.auth
        self._calls: dict[Call, _Served] = {}
        for member in self.members:
            self.registry = member.registry
            self._register_others()

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.cluster.run_until(self.cluster.scheduler.now + seconds)

    def entry(self, kind: int, body: bytes) -> None:
        """Write an entry that a member caused through the log."""
        self._enter(self.members[0], partial(self.node.submit, kind, body, Unheard(), MEMBER))
        self.wait(0.05)

    def token(self, name: str) -> str:
        """Return a token for a user, known to all members."""
        token = super().token(name)
        for member in self.members[1:]:
            member.users.granted(name.encode(), digest_of(token.partition(".")[0].encode()), 0)
        return token

    def start(self, method: str, request: Any, token: str | None = None, *, at: int = 0, **more: Any) -> Call:
        """Begin a call at a member."""
        member = self.members[at]
        self.registry = member.registry
        call = cast(Call, self._enter(member, partial(super().start, method, request, token, **more)))
        self._calls[call] = member
        return call

    def ask(self, call: Call, request: Any) -> None:
        """Send a further request on a stream."""
        self._enter(self._calls[call], partial(call.ask, request))

    def leave(self, call: Call, *, severed: bool = False) -> None:
        """End a call as its client does, or break its connection."""
        call.severed = severed
        self._enter(self._calls[call], partial(call.fail, 1))
        if call.task is not None:
            self._enter(self._calls[call], call.task.cancel)

    def run(self, program: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin a program that runs on the leader's loop."""
        member = self.members[0]
        return cast(asyncio.Task[T], self._enter(member, partial(member.loop.create_task, program)))

    def _enter(self, member: Member, action: Any) -> Any:
        with self.cluster._process():
            return member.loop.enter(action)

    def close(self) -> None:
        """End everything."""
        self.cluster.close()
