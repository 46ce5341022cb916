"""A whole member without sockets, on virtual time: the production replica, the guard and all services of clients.

world = LoneMember()
world.user("alice", ("READWRITE", b"a", b"b"))
world.enable()
call = world.start("etcdserverpb.KV/Put", request, world.token("alice"))
world.wait(0.1)                                     # seconds of virtual time
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from raftkv.apply.wire import MEMBER
from raftkv.config import ServerConfig
from raftkv.replica.replica import Replica
from raftkv.server.auth.users import Users
from raftkv.server.maintenance.quotas import QuotaService
from raftkv.server.maintenance.service import MaintenanceService
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
from tests.sim.clients.users import Unheard
from tests.sim.cluster import Cluster, ClusterParameters
from tests.sim.journal import stream
from tests.sim.member import Member

MEMBER_ID = 1


class Unchecked:
    """Checkers that check nothing: entries of users and quotas are unknown to the replay of the simulator."""

    violation = None

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class _Served(Member):
    """A simulated member with the services and the guard of the client ports."""

    def _serve(self, replica: Replica) -> None:
        node, guard = replica.node, replica.leader_guard
        responder = Responder(node, replica.applier, replica.header, replica.admission, replica.versions.check_capable)
        self.responder = responder
        self.users = Users(ServerConfig(bcrypt_cost=PASSWORD_COST), replica.applier, node, responder.slices)
        self.registry = Registry(self.users.guard.around)
        server, live = cast(Any, self.registry), self.users.live
        recipe = self.recipe = Recipe(responder, replica.hub, replica.lessor)
        leases = self.leases = LeaseService(responder, replica.lessor, guard, self.cork, live)
        watches = WatchService(
            replica.hub, replica.admission, guard, live, fragment_bytes=1 << 20, progress_interval_s=600
        )
        for service in (
            KVService(responder, 128),
            RangeStreamService(responder, 1 << 20),
            *(watches, leases, LockService(recipe), ElectionService(recipe, guard)),
            ClusterService(responder, replica.changes),
            MaintenanceService(responder, replica.store, 0, replica.defragmenter, replica.hashes),
            QuotaService(responder),
        ):
            service.register(server)
        self.users.serve(server, responder)
        replica.connect(graces=leases.graces, check_rights=live.applied, forget_tokens=self.users.tokens.forget_all)
        replica.start()
        self.loop.create_task(replica.housekeeping.run())
        self.loop.create_task(self._serve_clients())


class _Alone(Cluster):
    """A cluster of that member."""

    def _boot(self, voters: tuple[int, ...]) -> None:
        self.checkers = cast(Any, Unchecked())
        super()._boot(voters)

    def _make(self, id: int) -> Member:
        member = _Served(self, id, stream(self.seed, "member"), self.parameters.member.tick_s)
        self.members[id] = member
        return member


class LoneMember(World):
    """See the module."""

    def __init__(self) -> None:
        self._tokens = 0
        self.cluster = _Alone(0, ClusterParameters(1, is_managed=True))
        self.member = member = cast(_Served, self.cluster.members[MEMBER_ID])
        self.wait(5.0)
        self.node = cast(Any, member.node)
        self.applier = member.applier
        self.auth = self.applier.auth
        self.users, self.registry = member.users, member.registry
        self._register_others()

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.cluster.run_until(self.cluster.scheduler.now + seconds)

    def entry(self, kind: int, body: bytes) -> None:
        """See ``World``."""
        self._enter(partial(self.node.submit, kind, body, Unheard(), MEMBER))
        self.wait(0.05)

    def start(self, method: str, request: Any, token: str | None = None, **more: Any) -> Call:
        """See ``World``."""
        return cast(Call, self._enter(partial(super().start, method, request, token, **more)))

    def ask(self, call: Call, request: Any) -> None:
        """Send a further request on a stream."""
        self._enter(partial(call.ask, request))

    def leave(self, call: Call, *, severed: bool = False) -> None:
        """End a call as its client does, or break its connection."""
        call.severed = severed
        self._enter(partial(call.fail, 1))
        if call.task is not None:
            self._enter(call.task.cancel)

    def _enter(self, action: Any) -> Any:
        with self.cluster._process():
            return self.member.loop.enter(action)

    def close(self) -> None:
        """End everything."""
        self.cluster.close()
