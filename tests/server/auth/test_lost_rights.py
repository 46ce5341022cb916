"""Every method x every moment of its call x every way to lose the right to it: the rest shows and does nothing new.

A call is played once undisturbed. Then it is played again for each of its moments: between two callbacks of the loop
the right goes, by an applied entry, and then everything that an answer could show changes. The call may end as it did
undisturbed, or be refused; it may not show anything of after, nor change anything more.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raftkv.apply import wire
from raftkv.apply.wire import Kind
from raftkv.loop import scheduler
from raftkv.pb import admin_pb2, election_pb2, lock_pb2, rpc_pb2
from raftkv.pb.services import SERVICES
from raftkv.replica.maintenance.hashes import Hashes
from raftkv.server.auth.table import ANYBODY, TABLE
from raftkv.server.maintenance.quotas import QuotaService
from raftkv.server.maintenance.service import MaintenanceService
from raftkv.server.services.cluster import ClusterService
from raftkv.server.streams import lease
from tests.server.auth.cases import HASH, REQUESTS
from tests.server.auth.test_guard import watch
from tests.server.auth.test_long_calls import (
    CERTIFICATE,
    EVENTS,
    SIGNED,
    SIMPLE,
    Alice,
    Event,
    _change_another,
    _change_password,
    _expire,
    _replace_user,
    _revoke_role,
)
from tests.server.auth.test_matrix import REFUSALS
from tests.server.auth.world import Call, World
from tests.virtual_loop import NodeLoop, Scheduler

SECRET = b"secret"
CALL_S = 1.0
"""Virtual time in which a call ends, or waits for something that does not come."""

OF_ALICE: list[tuple[str, Any]] = [
    ("etcdserverpb.KV/Range", rpc_pb2.RangeRequest(key=b"a/1")),
    ("etcdserverpb.KV/Range", rpc_pb2.RangeRequest(key=b"a", range_end=b"b")),
    ("etcdserverpb.KV/Range", rpc_pb2.RangeRequest(key=b"a", range_end=b"b", count_only=True, serializable=True)),
    ("etcdserverpb.KV/RangeStream", rpc_pb2.RangeRequest(key=b"a", range_end=b"b")),
    ("etcdserverpb.KV/Put", rpc_pb2.PutRequest(key=b"a/1", value=b"mine", prev_kv=True, lease=200)),
    ("etcdserverpb.KV/DeleteRange", rpc_pb2.DeleteRangeRequest(key=b"a", range_end=b"b", prev_kv=True)),
    *(
        ("etcdserverpb.KV/Txn", rpc_pb2.TxnRequest(compare=compares, success=operations))
        for compares in (
            [rpc_pb2.Compare(key=b"a/1", target="VERSION", version=1)],
            [rpc_pb2.Compare(key=b"a", range_end=b"b", target="VALUE", result="NOT_EQUAL", value=SECRET)],
        )
        for operations in (
            [rpc_pb2.RequestOp(request_range=rpc_pb2.RangeRequest(key=b"a", range_end=b"b"))],
            [rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=b"a/2%d" % number)) for number in range(100)],
            [
                rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=b"a/2", value=bytes(10_000))),
                rpc_pb2.RequestOp(request_range=rpc_pb2.RangeRequest(key=b"a", range_end=b"b")),
            ],
        )
    ),
    ("etcdserverpb.Watch/Watch", watch(b"a", b"b")),
    ("etcdserverpb.Lease/LeaseGrant", rpc_pb2.LeaseGrantRequest(ID=50, TTL=60)),
    ("etcdserverpb.Lease/LeaseRevoke", rpc_pb2.LeaseRevokeRequest(ID=200)),
    ("etcdserverpb.Lease/LeaseKeepAlive", rpc_pb2.LeaseKeepAliveRequest(ID=200)),
    ("etcdserverpb.Lease/LeaseTimeToLive", rpc_pb2.LeaseTimeToLiveRequest(ID=200, keys=True)),
    ("etcdserverpb.Lease/LeaseLeases", rpc_pb2.LeaseLeasesRequest()),
    ("etcdserverpb.Cluster/MemberList", rpc_pb2.MemberListRequest(linearizable=True)),
    ("etcdserverpb.Maintenance/Alarm", rpc_pb2.AlarmRequest()),
    ("etcdserverpb.Maintenance/Status", rpc_pb2.StatusRequest()),
    ("etcdserverpb.Auth/UserGet", rpc_pb2.AuthUserGetRequest(name="alice")),
    ("etcdserverpb.Auth/RoleGet", rpc_pb2.AuthRoleGetRequest(role="role-alice")),
    ("v3lockpb.Lock/Lock", lock_pb2.LockRequest(name=b"a", lease=201)),
    ("v3lockpb.Lock/Lock", lock_pb2.LockRequest(name=b"a/free", lease=201)),
    ("v3lockpb.Lock/Unlock", lock_pb2.UnlockRequest(key=b"a/1")),
    ("v3electionpb.Election/Campaign", election_pb2.CampaignRequest(name=b"a", lease=201, value=b"mine")),
    ("v3electionpb.Election/Campaign", election_pb2.CampaignRequest(name=b"a/free", lease=201, value=b"mine")),
    (
        "v3electionpb.Election/Proclaim",
        election_pb2.ProclaimRequest(leader=election_pb2.LeaderKey(key=b"a/1", rev=2, lease=200), value=b"mine"),
    ),
    ("v3electionpb.Election/Leader", election_pb2.LeaderRequest(name=b"a")),
    ("v3electionpb.Election/Observe", election_pb2.LeaderRequest(name=b"a")),
    (
        "v3electionpb.Election/Resign",
        election_pb2.ResignRequest(leader=election_pb2.LeaderKey(key=b"a/1", rev=2, lease=200)),
    ),
]  # fmt: skip
OF_ROOT: list[tuple[str, Any]] = [
    ("etcdserverpb.KV/Compact", rpc_pb2.CompactionRequest(revision=2)),
    ("etcdserverpb.Maintenance/Alarm", rpc_pb2.AlarmRequest(action="ACTIVATE", memberID=5, alarm="NOSPACE")),
    ("etcdserverpb.Maintenance/MoveLeader", rpc_pb2.MoveLeaderRequest(targetID=3)),
    ("etcdserverpb.Maintenance/Downgrade", rpc_pb2.DowngradeRequest(action="VALIDATE", version="3.6")),
    ("etcdserverpb.Maintenance/Downgrade", rpc_pb2.DowngradeRequest(action="ENABLE", version="3.6")),
    ("etcdserverpb.Auth/UserAdd", rpc_pb2.AuthUserAddRequest(name="mine", hashedPassword=HASH)),
    ("etcdserverpb.Auth/UserGet", rpc_pb2.AuthUserGetRequest(name="other")),
    ("etcdserverpb.Auth/UserDelete", rpc_pb2.AuthUserDeleteRequest(name="other")),
    ("etcdserverpb.Auth/UserChangePassword", rpc_pb2.AuthUserChangePasswordRequest(name="other", hashedPassword=HASH)),
    ("etcdserverpb.Auth/UserGrantRole", rpc_pb2.AuthUserGrantRoleRequest(user="other", role="root")),
    ("etcdserverpb.Auth/UserRevokeRole", rpc_pb2.AuthUserRevokeRoleRequest(name="other", role="role-other")),
    ("etcdserverpb.Auth/RoleAdd", rpc_pb2.AuthRoleAddRequest(name="mine")),
    ("etcdserverpb.Auth/RoleGet", rpc_pb2.AuthRoleGetRequest(role="role-other")),
    ("etcdserverpb.Auth/RoleDelete", rpc_pb2.AuthRoleDeleteRequest(role="role-other")),
    (
        "etcdserverpb.Auth/RoleGrantPermission",
        rpc_pb2.AuthRoleGrantPermissionRequest(name="role-other", perm={"key": b"m"}),
    ),
    (
        "etcdserverpb.Auth/RoleRevokePermission",
        rpc_pb2.AuthRoleRevokePermissionRequest(role="role-other", key=b"o", range_end=b"p"),
    ),
    ("raftkvpb.Admin/QuotaSet", admin_pb2.QuotaSetRequest(prefix=b"mine", keys_max=9)),
    ("raftkvpb.Admin/QuotaRemove", admin_pb2.QuotaRemoveRequest(prefix=b"other")),
    ("raftkvpb.Admin/LimitSet", admin_pb2.LimitSetRequest(limit={"kind": "user", "name": b"m", "watches_max": 9})),
]  # fmt: skip
ROWS = [
    *((method, request, False) for method, request in OF_ALICE),
    *((method, request, True) for method, request in OF_ROOT),
    *(
        (f"{service}/{name}", REQUESTS.get(name) or SERVICES[service][name].request(), True)
        for service, rows in TABLE.items()
        for name, row in rows.items()
        if row.check is not None
        and row is not ANYBODY
        and f"{service}/{name}" not in {method for method, _ in (*OF_ALICE, *OF_ROOT)}
    ),
]
"""Method, request, and whether it is root's; methods without a request above are asked with an empty one."""


class SteppedLoop(NodeLoop):
    """A loop that calls back between two of its callbacks."""

    interrupt: Callable[[], None]

    def died(self) -> None:
        """Implement ``NodeLoop.died``."""
        self.interrupt()


class Defragmenter:
    """Has done all that it is asked for."""

    async def run(self, is_allowed: Callable[[], bool]) -> None:
        """Do nothing: another test takes rights from the production class."""


def _entry(world: World, kind: int, message: Any, *, is_versioned: bool = True) -> None:
    data = message.SerializeToString()
    world.entry(kind, wire.versioned(kind, data) if is_versioned else data)


def populate(world: World) -> None:
    """Make what calls ask for, and the services that a world of users lacks."""
    world.put(b"a/1", b"before", 200)
    _entry(world, Kind.HISTORY_QUOTA, admin_pb2.QuotaSetRequest(prefix=b"other", keys_max=9))
    responder, moved = world.responder, vars(world.node)
    moved.update(committed=9, moved_to=0, conf_state=SimpleNamespace(voters=(2, 3), learners=()))
    moved["transfer_leader"] = lambda target: moved.update(moved_to=target, leader=target)
    server = cast(Any, world.registry)
    QuotaService(responder).register(server)
    server.unary("/etcdserverpb.Cluster/MemberList", ClusterService(responder, cast(Any, None)).member_list)
    hashes = Hashes(world.machine.store, 2, lambda error: None)
    MaintenanceService(responder, world.machine.store, 0, cast(Any, Defragmenter()), hashes).register(server)


def _alarm(world: World, action: Any, member_id: int) -> None:
    alarm = rpc_pb2.AlarmRequest(action=action, memberID=member_id, alarm="NOSPACE")
    _entry(world, Kind.ALARM, alarm, is_versioned=False)


def happens(world: World) -> None:
    """Change everything that an answer could show."""
    _alarm(world, "DEACTIVATE", 5)
    for key in (b"a/secret", b"a/1", b"a/free/secret"):
        world.put(key, SECRET, 200)
    _entry(world, Kind.DELETE_RANGE, rpc_pb2.DeleteRangeRequest(key=b"a/1"), is_versioned=False)
    world.user("secret", ("READ", SECRET, b""))
    if b"alice" in world.auth.users:
        world.change(user_grant_role=rpc_pb2.AuthUserGrantRoleRequest(user="alice", role="role-secret"))
    for role in ("role-alice", "role-other"):
        if role in world.auth.roles:
            world.permit(role, "READ", SECRET, b"")
    if b"other" in world.auth.users:
        world.change(user_grant_role=rpc_pb2.AuthUserGrantRoleRequest(user="other", role="role-secret"))
    _entry(world, Kind.HISTORY_QUOTA, admin_pb2.QuotaSetRequest(prefix=SECRET, keys_max=9))
    _entry(world, Kind.LIMIT, admin_pb2.Limit(kind="user", name=SECRET, watches_max=9))
    if not world.applier.downgrade.info.enabled:
        _entry(world, Kind.DOWNGRADE, rpc_pb2.DowngradeInfo(enabled=True, targetVersion="3.6.0"))
    world.applier.membership.members[9] = rpc_pb2.Member(ID=9, name="secret")
    _alarm(world, "ACTIVATE", 9)


def _disable_and_enable(alice: Alice) -> None:
    alice.world.change(disable=rpc_pb2.AuthDisableRequest())
    alice.world.enable()


def _receive_database(alice: Alice) -> None:
    """Lose the role by a database of the leader, as a member that lags for long."""
    _revoke_role(alice)
    alice.world.auth.reload()
    alice.world.users.tokens.forget_all()


LOSSES = [
    *((act, shown) for act, by_shown in EVENTS for shown in by_shown if act not in (_expire, _change_another)),
    *((act, shown) for act in (_disable_and_enable, _receive_database) for shown in (SIMPLE, SIGNED, CERTIFICATE)),
]


def applied(world: World) -> None:
    """The end of a turn that has applied entries."""
    for callback in world.node.on_applied:
        callback()


def effects(world: World) -> tuple[Any, ...]:
    """Everything that is stored, and whom a leader has handed over to."""
    world.machine.store.commit()
    stored = {name: dict(bucket) for name, bucket in world.machine.backend.buckets.items()}
    return stored, vars(world.node)["moved_to"]


class Play:
    """One call, and what became of it; at a moment its right goes.

    Attributes:
        is_over: whether the call had ended, or waited for what never comes, before the moment.
        answers, status: of the call, without headers.
        before, after: effects at the moment, and at the end.
        has_waited: whether the call had a key in a queue at the moment.
        is_refused_now: whether the same request, made at the end, is refused.
    """

    def __init__(
        self, row: tuple[str, Any, bool], act: Event, shown: str, folder: Path, clock: list[float], moment: int = -1,
        *, is_looked_at: bool = True
    ) -> None:  # fmt: skip
        self.method, self.request, self.is_root = row
        timeline = Scheduler(random.Random(0))
        loop = SteppedLoop(timeline)
        make = partial(Alice, act, shown, folder, clock, "root" if self.is_root else "")
        self.alice = loop.enter(make)
        self.world = world = self.alice.world
        loop.enter(self._prepare, is_looked_at)
        self.is_over = True
        self.has_waited = False
        loop.interrupt = partial(self._lose, act)
        call: Call = loop.enter(self.alice.start, self.method, self.request)
        self.call = call
        if moment >= 0:
            loop.crash_after(moment)
        timeline.run_until(CALL_S)
        if moment >= 0 and self.is_over:
            loop.crash_after(-1)
            loop.enter(self._lose, act)
            self.is_over = True
        timeline.run_until(2 * CALL_S)
        self.after = loop.enter(effects, world)
        self.answers = [self._without_header(data) for data in call.answers]
        self.status = call.status
        fresh = loop.enter(self.alice.start, self.method, self.request)
        timeline.run_until(3 * CALL_S)
        self.is_refused_now = _refused(fresh)
        timeline.tear_down()
        assert timeline.failures == []

    def _prepare(self, is_looked_at: bool) -> None:
        world = self.world
        world.user("other", ("READ", b"o", b"p"))
        populate(world)
        if not is_looked_at:
            world.node.on_applied.remove(world.users.live.applied)
        world.responder.slices.spend(1.0)

    def _lose(self, act: Event) -> None:
        self.is_over = False
        act(self.alice)
        applied(self.world)
        self.has_waited = self.world.machine.store.get(b"a/c9") is not None
        happens(self.world)
        applied(self.world)
        self.before = effects(self.world)

    def _without_header(self, data: bytes) -> Any:
        service, _, name = self.method.partition("/")
        message = SERVICES[service][name].response.FromString(data)
        for part in (message, getattr(message, "range_response", None)):
            if part is not None and "header" in part.DESCRIPTOR.fields_by_name:
                part.ClearField("header")
        return message


def _refused(call: Call) -> bool:
    if call.status is not None:
        return call.status[1] in REFUSALS
    last = rpc_pb2.WatchResponse.FromString(call.answers[-1]) if call.answers else None
    return last is not None and last.canceled


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The wall clock; and slices in which long work does one piece."""
    now = [time.time()]
    monkeypatch.setattr(time, "time", lambda: now[0])
    for name in ("SLICE_S", "INLINE_S"):
        monkeypatch.setattr(scheduler, name, 0.0)
    monkeypatch.setattr(scheduler, "TURN_S", 1e-9)
    monkeypatch.setattr(scheduler, "RUN_ITEMS", 1)
    monkeypatch.setattr(lease, "LEASES_PER_PIECE", 1)
    yield now


def faults(play: Play, whole: Play, act: Event) -> Iterator[str]:
    """What a call showed or did after its right had gone; ``whole``: the same call with its right."""
    answers = [answer for answer in play.answers if not getattr(answer, "canceled", False)]
    if answers != whole.answers[: len(answers)]:
        yield f"shows {answers}"
    if play.is_root and act in (_change_password, _disable_and_enable):
        return  # as in etcd, an entry that needs root counts by the role of its user, even if the token has ended
    if play.status != whole.status and (play.status is None or play.status[1] not in REFUSALS):
        yield f"ends with {play.status}"
    if play.before != play.after and not _withdrawn(play):
        yield "changes something"


def _withdrawn(play: Play) -> bool:
    """Whether the key of a wait was deleted, by the member: others must not wait for it."""
    return play.has_waited and play.world.machine.store.get(b"a/c9") is None


SHORT = ((_revoke_role, SIGNED), (_replace_user, SIGNED))
CASES = [
    pytest.param(
        *case,
        number % 2 == 0,
        id=f"{case[0].__name__.strip('_')}, {case[1]}, {'check is late' if number % 2 else 'checked at once'}",
        marks=[] if case in SHORT else pytest.mark.long,
    )
    for number, case in enumerate(LOSSES)
]
"""Each loss and credential; the check of all calls comes at once or late, in turn."""


@pytest.mark.interpreted  # its node is made of a part of the real one
@pytest.mark.parametrize(("act", "shown", "is_looked_at"), CASES)
def test_call_shows_and_does_nothing_of_after_its_right(
    tmp_path: Path, clock: list[float], act: Event, shown: str, is_looked_at: bool
) -> None:
    wrong: list[str] = []
    lost = 0
    for row in ROWS:
        whole = Play(row, act, shown, tmp_path, clock)
        is_over, moment = False, 0
        while not is_over:
            play = Play(row, act, shown, tmp_path, clock, moment, is_looked_at=is_looked_at)
            if play.is_refused_now:
                lost += 1
                wrong += [f"{row[0]}, {row[1]!r}, moment {moment}: {fault}" for fault in faults(play, whole, act)]
            is_over, moment = play.is_over, moment + 1
    print(f"{lost} calls that lost their right")
    assert wrong == []
