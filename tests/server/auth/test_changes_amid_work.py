"""Users and rights that change during calls: a call continues or ends by the rights valid at that moment."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raftkv import errors
from raftkv.apply import wire
from raftkv.apply.auth.rights import Rights
from raftkv.apply.wire import Kind
from raftkv.loop import scheduler
from raftkv.loop.scheduler import SHORT_ACTIVE_MAX, Slices, Work
from raftkv.pb import admin_pb2, election_pb2, rpc_pb2
from raftkv.replica.watch.stream import RECHECKS_PER_STEP
from raftkv.server.maintenance.quotas import QuotaService
from raftkv.server.maintenance.service import MaintenanceService
from raftkv.server.maintenance.snapshot import SnapshotService
from raftkv.server.services.cluster import ClusterService
from raftkv.storage.backend.lmdb import LMDBBackend, ThreadWriter
from raftkv.storage.mvcc import Store
from tests.replica.maintenance.test_defragmenter import Fake, make
from tests.rpc.loop import until
from tests.server.auth import test_guard
from tests.server.auth.test_guard import BAD_TOKEN, DENIED, RANGE, TXN, answers, settled, watch, world_of_alice
from tests.server.auth.world import World, stop

WATCH = "etcdserverpb.Watch/Watch"
world = test_guard.world


def revoke(world: World) -> None:
    """Take alice's right to everything."""
    world.change(role_delete=rpc_pb2.AuthRoleDeleteRequest(role="role-alice"))


async def test_watchers_outlast_a_second_change_of_users_amid_the_look_at_the_first(world: World) -> None:
    call = world.start(WATCH, watch(b"a1", b""), world.token("alice"))
    count = RECHECKS_PER_STEP + 10
    for _ in range(count - 1):
        call.ask(watch(b"a1", b""))
    await settled(call, count)
    look = world.users.live.of(call).steps()
    next(look)
    world.change(role_add=rpc_pb2.AuthRoleAddRequest(name="of-others"))
    for _ in look:
        pass
    world.put(b"a1")
    world.node.let_go()
    await settled(call, 2 * count)
    assert [(each.canceled, len(each.events)) for each in answers(call)[count:]] == [(False, 1)] * count
    await stop(call)


async def test_a_wait_outlasts_a_second_change_of_users_amid_the_look_at_the_first(world: World) -> None:
    call: Any = world.start(
        "v3electionpb.Election/Observe", election_pb2.LeaderRequest(name=b"a1"), world.token("alice")
    )
    await until(lambda: len(world.users.live) == 1)
    live = world.users.live.of(call)
    check = live._check
    assert check is not None

    def slowly(caller: Any) -> Iterator[None]:
        yield
        yield from check(caller)

    live._check = slowly
    look = live.steps()
    next(look)
    world.change(role_add=rpc_pb2.AuthRoleAddRequest(name="of-others"))
    for _ in look:
        pass
    assert not call.done
    revoke(world)
    world.node.let_go()
    await until(lambda: call.done)
    assert call.status == (errors.UNKNOWN, "etcdserver: permission denied")


@pytest.mark.parametrize("method", [RANGE, TXN, "etcdserverpb.KV/RangeStream"])
async def test_a_read_that_waits_for_its_slice_is_checked_when_it_begins(world: World, method: str) -> None:
    request: Any = rpc_pb2.RangeRequest(key=b"a", range_end=b"b")
    if method == TXN:
        request = rpc_pb2.TxnRequest(success=[rpc_pb2.RequestOp(request_range=request)])
    world.node.is_held = True
    call = world.start(method, request, world.token("alice"))
    world.responder.slices.spend(1.0)
    world.node.let_go()
    assert not call.done
    revoke(world)
    world.put(b"a1", b"written after the right was gone")
    await until(lambda: call.done)
    assert call.status == DENIED


async def test_delayed_member_list_is_withheld_from_deleted_user(world: World) -> None:
    service = ClusterService(world.responder, cast(Any, None))
    world.registry.unary("/etcdserverpb.Cluster/MemberList", service.member_list)
    world.node.is_held = True
    request = rpc_pb2.MemberListRequest(linearizable=True)
    calls = [world.start("etcdserverpb.Cluster/MemberList", request, world.token("alice")) for _ in range(2)]
    assert not any(call.done for call in calls)
    world.change(user_delete=rpc_pb2.AuthUserDeleteRequest(name="alice"))
    world.node.let_go()
    assert [call.status for call in calls] == [(errors.UNAUTHENTICATED, "etcdserver: invalid auth token")] * 2


async def test_member_that_another_member_has_just_added_can_be_updated_here(world: World) -> None:
    """A member that lagged said that there is none of this id, without asking whether it knows all."""
    urls: list[tuple[str, ...]] = []

    async def update(member_id: int, peer_urls: tuple[str, ...], caller: object) -> list[rpc_pb2.Member]:
        urls.append(peer_urls)
        return []

    ClusterService(world.responder, cast(Any, SimpleNamespace(update=update))).register(cast(Any, world.registry))
    world.node.is_held = True
    for is_known in (True, False):
        request = rpc_pb2.MemberUpdateRequest(ID=7 + is_known, peerURLs=["http://127.0.0.1:1"])
        call = world.start("etcdserverpb.Cluster/MemberUpdate", request, world.token("root"))
        await until(lambda call=call: world.node.holds or call.done)
        if is_known:
            world.responder.applier.membership.members[8] = rpc_pb2.Member(ID=8)
        world.node.let_go()
        await until(lambda call=call: call.done)
        assert call.status == ((errors.OK, "") if is_known else (errors.NOT_FOUND, "etcdserver: member not found"))
    assert urls == [("http://127.0.0.1:1",)]


async def test_a_call_begun_before_auth_was_enabled_is_shown_no_keys_of_a_lease() -> None:
    world = World((200,))
    world.user("alice", ("READWRITE", b"a", b"b"))
    world.put(b"secret", lease=200)
    request = rpc_pb2.LeaseTimeToLiveRequest(ID=200, keys=True)
    call = world.start("etcdserverpb.Lease/LeaseTimeToLive", request, cn="alice")
    await asyncio.sleep(0)  # the handler begins
    world.enable()
    await until(lambda: call.done)
    assert call.status == (errors.INVALID_ARGUMENT, "etcdserver: revision of auth store is old")


@pytest.mark.parametrize("is_enabled", [False, True])
async def test_ids_of_leases_are_not_listed_behind_the_right(monkeypatch: pytest.MonkeyPatch, is_enabled: bool) -> None:
    world = World((200,))
    world.user("alice", ("READWRITE", b"a", b"b"))
    world.put(b"a", lease=200)
    if is_enabled:
        world.enable()
    looked: list[str] = []

    def ends() -> Iterator[tuple[float, int]]:
        yield 1.0, 200
        looked.append("all")
        (revoke if is_enabled else World.enable)(world)

    monkeypatch.setattr(world.leases, "ends", ends)
    token = world.token("alice") if is_enabled else None
    call = world.start("etcdserverpb.Lease/LeaseLeases", rpc_pb2.LeaseLeasesRequest(), token)
    await until(lambda: call.done)
    assert looked
    assert call.status == (errors.INVALID_ARGUMENT, "etcdserver: revision of auth store is old")


@pytest.mark.parametrize("is_queued", [False, True], ids=["under way", "queued"])
async def test_defragmentation_ends_with_the_right_to_it(monkeypatch: pytest.MonkeyPatch, is_queued: bool) -> None:
    world, fake = world_of_alice(), Fake()
    for name in ("carol", "dave"):
        world.user(name, role="root")
    service = MaintenanceService(world.responder, cast(Any, fake), 0, make(fake), cast(Any, None))
    service.register(cast(Any, world.registry))
    defragment = partial(world.start, "etcdserverpb.Maintenance/Defragment", rpc_pb2.DefragmentRequest())
    calls = []
    may_end = threading.Event()
    if not is_queued:
        monkeypatch.setattr(fake, "copy", may_end.wait)
    else:
        calls.append(defragment(world.token("dave")))
        await fake.is_waiting.wait()
    calls.append(defragment(world.token("carol")))
    await until(lambda: fake.runs == 1)
    world.change(user_delete=rpc_pb2.AuthUserDeleteRequest(name="carol"))
    world.node.let_go()
    may_end.set()
    if is_queued:
        await fake.end()
    await until(lambda: all(call.done for call in calls))
    await until(lambda: fake.closed == 1)
    statuses = [call.status for call in calls]
    assert statuses[-1] == (errors.UNAUTHENTICATED, "etcdserver: invalid auth token")
    assert statuses[:-1] == [(errors.OK, "")] * is_queued
    for _ in range(3):
        await asyncio.sleep(0)
    assert (fake.runs, fake.is_waiting.is_set()) == (1, False)


async def test_snapshot_that_waited_for_the_disk_shows_nothing_of_after_the_right(world: World, tmp_path: Path) -> None:
    world.user("carol", role="root")
    backend = LMDBBackend(tmp_path / "db", 16 << 20)
    store = Store.open(backend, ThreadWriter(asyncio.get_running_loop().call_soon_threadsafe))
    check = partial(world.responder.check_again, check=Rights.check_root)
    SnapshotService(store, backend, check=check).register(cast(Any, world.registry))
    call: Any = world.start("etcdserverpb.Maintenance/Snapshot", rpc_pb2.SnapshotRequest(), world.token("carol"))
    await asyncio.sleep(0)  # the handler begins
    assert not call.done
    world.change(user_revoke_role=rpc_pb2.AuthUserRevokeRoleRequest(name="carol", role="root"))
    await until(lambda: call.done)
    assert (call.status, call.answers) == (DENIED, [])
    store.close()
    backend.close()


def _endless() -> Work[None]:
    while True:
        yield


async def test_a_watch_ends_with_the_right_however_many_long_reads_wait(world: World) -> None:
    call = world.start(WATCH, watch(b"a1", b""), world.token("alice"))
    await settled(call, 1)
    slices: Slices = world.responder.slices
    jobs = [slices.run(_endless, lambda error: None, 0, b"other") for _ in range(SHORT_ACTIVE_MAX + 1)]
    slices.spend(1.0)
    revoke(world)
    world.put(b"a1")
    world.node.let_go()
    for _ in range(3):  # no thread is waited for: beside a loop that is always busy, that took up to 87 s
        await asyncio.sleep(0)
    assert [(each.canceled, len(each.events)) for each in answers(call)[1:]] == [(True, 0)]
    for job in jobs:
        job.cancel()
    await stop(call)


@pytest.mark.parametrize("fragment", [False, True])
async def test_no_event_comes_behind_the_right_however_many_watch(monkeypatch, fragment):
    """A look at many watchers takes several slices: with 100,000 they were told of secrets for a second."""
    monkeypatch.setattr(scheduler, "SLICE_S", 0.0)
    world = world_of_alice()
    world.user("bob", ("READ", b"a", b"b"))
    count = 3 * RECHECKS_PER_STEP
    request = watch(b"a1", b"")
    request.create_request.fragment = fragment
    calls = [world.start(WATCH, request, world.token(name)) for name in ("alice", "bob")]
    for call in calls:
        for _ in range(count - 1):
            call.ask(request)
        await settled(call, count)
    revoke(world)
    for number in range(5):
        world.put(b"a1", b"%d" % number)
        world.node.let_go()
        await asyncio.sleep(0)
    of_alice, of_bob = calls
    await settled(of_alice, 2 * count)
    await until(lambda: sum(len(each.events) for each in answers(of_bob)) == 5 * count)
    assert {(each.canceled, len(each.events)) for each in answers(of_alice)[count:]} == {(True, 0)}
    assert not any(each.canceled for each in answers(of_bob))
    for call in calls:
        await stop(call)


async def test_watches_continue_during_user_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No look comes to its end before the next change."""
    monkeypatch.setattr(scheduler, "SLICE_S", 0.0)
    world = world_of_alice()
    count = 3 * RECHECKS_PER_STEP
    call = world.start(WATCH, watch(b"a1", b""), world.token("alice"))
    for _ in range(count - 1):
        call.ask(watch(b"a1", b""))
    await settled(call, count)
    world.put(b"a1")
    for number in range(1_000):
        world.change(role_add=rpc_pb2.AuthRoleAddRequest(name=f"role-{number}"))
        world.node.let_go()
        await asyncio.sleep(0)
        if sum(len(each.events) for each in answers(call)) == count:
            break
    assert number < 999
    await stop(call)


def replace(world: World) -> None:
    """Delete alice, and add another of that name and the same rights."""
    world.change(user_delete=rpc_pb2.AuthUserDeleteRequest(name="alice"))
    world.user("alice", role="role-alice")


async def test_watch_is_not_passed_on_to_a_later_user_added_amid_the_look_at_it(world: World) -> None:
    call = world.start(WATCH, watch(b"a1", b""), cn="alice")
    count = RECHECKS_PER_STEP + 10
    for _ in range(count - 1):
        call.ask(watch(b"a1", b""))
    await settled(call, count)
    look = world.users.live.of(call).steps()
    next(look)
    replace(world)
    for _ in look:
        pass
    world.put(b"a1")
    world.node.let_go()
    await settled(call, 2 * count)
    assert {(each.canceled, len(each.events)) for each in answers(call)[count:]} == {(True, 0)}
    call.ask(watch(b"a1", b""))  # the later user's
    await settled(call, 2 * count + 1)
    assert not answers(call)[-1].canceled
    await stop(call)


@pytest.mark.parametrize("ends", [revoke, replace])
async def test_observer_is_told_no_leader_behind_the_right(world: World, ends: Callable[[World], None]) -> None:
    observe = election_pb2.LeaderRequest(name=b"a")
    call: Any = world.start("v3electionpb.Election/Observe", observe, cn="alice")
    await until(lambda: len(world.users.live) == 1)
    world.put(b"a/1", b"first")
    world.node.let_go()
    await until(lambda: len(call.answers) == 1)
    world.node.on_applied.remove(world.users.live.applied)  # the look does not come to this call
    ends(world)
    world.put(b"a/1", b"secret")
    world.node.let_go()
    await until(lambda: call.done)
    text = "permission denied" if ends is revoke else "revision of auth store is old"
    assert (call.status, len(call.answers)) == ((errors.UNKNOWN, f"etcdserver: {text}"), 1)


async def test_change_of_users_is_not_made_in_the_name_of_a_later_user(world: World) -> None:
    """Its password waited to be hashed, while the administrator was deleted and another of that name was added."""
    world.user("carol", role="root")
    world.node.is_held = True
    request = rpc_pb2.AuthUserAddRequest(name="backdoor", password="a long password")
    call = world.start("etcdserverpb.Auth/UserAdd", request, world.token("carol"))
    world.change(user_delete=rpc_pb2.AuthUserDeleteRequest(name="carol"))
    world.user("carol", role="root")
    await until(lambda: world.node.holds or call.done)
    world.node.let_go()
    await until(lambda: call.done)
    assert call.status == BAD_TOKEN
    assert b"backdoor" not in world.auth.users


async def test_lagging_leader_does_not_transfer_for_deleted_user(world: World) -> None:
    world.user("carol", role="root")
    moved: list[int] = []
    vars(world.node).update(conf_state=SimpleNamespace(voters=(2, 3)), transfer_leader=moved.append)
    service = MaintenanceService(world.responder, cast(Any, None), 0, cast(Any, None), cast(Any, None))
    service.register(cast(Any, world.registry))
    world.node.is_held = True
    request = rpc_pb2.MoveLeaderRequest(targetID=3)
    call = world.start("etcdserverpb.Maintenance/MoveLeader", request, world.token("carol"))
    await until(lambda: world.node.holds or bool(moved))
    world.change(user_revoke_role=rpc_pb2.AuthUserRevokeRoleRequest(name="carol", role="root"))
    world.node.let_go()
    await until(lambda: call.done)
    assert (call.status, moved) == (DENIED, [])


Change = Callable[[World], None]
# What carol, and alice, ask for; and a change behind their rights that the answer must not show.
WAITING: dict[str, tuple[Any, Change]] = {
    "etcdserverpb.Auth/UserList": (rpc_pb2.AuthUserListRequest(), lambda world: world.user("secret")),
    "etcdserverpb.Auth/RoleList": (
        rpc_pb2.AuthRoleListRequest(),
        lambda world: world.change(role_add=rpc_pb2.AuthRoleAddRequest(name="secret")),
    ),
    "etcdserverpb.Auth/RoleGet": (
        rpc_pb2.AuthRoleGetRequest(role="role-alice"),
        lambda world: world.permit("role-alice", "READ", b"secret", b""),
    ),
    "raftkvpb.Admin/QuotaList": (
        admin_pb2.QuotaListRequest(),
        lambda world: world.entry(
            Kind.HISTORY_QUOTA,
            wire.versioned(
                Kind.HISTORY_QUOTA, admin_pb2.QuotaSetRequest(prefix=b"secret", keys_max=9).SerializeToString()
            ),
        ),
    ),
    "v3electionpb.Election/Leader": (
        election_pb2.LeaderRequest(name=b"a"), lambda world: world.put(b"a/1", b"secret")
    ),
    "etcdserverpb.KV/RangeStream": (
        rpc_pb2.RangeRequest(key=b"a", range_end=b"b"), lambda world: world.put(b"a/1", b"secret")
    ),
}  # fmt: skip


@pytest.mark.parametrize("method", WAITING)
async def test_answer_that_waited_shows_nothing_of_after_the_right(world: World, method: str) -> None:
    """For a quorum, or its turn among long reads; and the look at all calls has not come to this one."""
    world.user("carol", role="root")
    QuotaService(world.responder).register(cast(Any, world.registry))
    world.node.on_applied.remove(world.users.live.applied)
    slices: Slices = world.responder.slices
    jobs = [slices.run(_endless, lambda error: None, 0, b"%d" % number) for number in range(2 * SHORT_ACTIVE_MAX)]
    request, happen = WAITING[method]
    is_of_root = method.startswith(("etcdserverpb.Auth", "raftkvpb"))
    world.put(b"a/1", b"before")
    world.node.is_held = not method.startswith("etcdserverpb.Auth")
    call = world.start(method, request, world.token("carol" if is_of_root else "alice"))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not call.done
    if is_of_root:
        world.change(user_revoke_role=rpc_pb2.AuthUserRevokeRoleRequest(name="carol", role="root"))
    else:
        revoke(world)
    happen(world)
    for job in jobs:
        job.cancel()
    world.node.let_go()
    await until(lambda: call.done)
    assert call.status is not None
    assert call.status[1] == DENIED[1]
    assert b"secret" not in b"".join(call.answers)


@pytest.mark.parametrize("method", [WATCH, "etcdserverpb.Lease/LeaseKeepAlive"])
async def test_stream_of_requests_records_its_user(method: str) -> None:
    """The audit log and the dashboard say so."""
    world = world_of_alice((200,))
    request: Any = watch(b"b", b"") if method == WATCH else rpc_pb2.LeaseKeepAliveRequest(ID=200)
    call = world.start(method, request, world.token("alice"))
    await settled(call, 1)
    assert call.caller is not None
    assert call.caller.user == b"alice"
    await stop(call)


async def test_stream_opened_before_auth_records_its_user() -> None:
    world = World()
    world.user("alice", ("READWRITE", b"a", b"b"))
    call = world.start(WATCH, watch(b"a1", b""), cn="alice")
    await settled(call, 1)
    assert call.caller is None
    world.enable()
    world.node.let_go()
    call.ask(watch(b"a2", b""))
    await settled(call, 2)
    assert call.caller is not None
    assert call.caller.user == b"alice"
    await stop(call)
