"""Admission by tokens, certificates or neither; and the answers to refused calls, as etcd's."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from raftkv import errors
from raftkv.apply.wire import Caller
from raftkv.pb import lock_pb2, raft_pb2, rpc_pb2
from raftkv.pb.services import SERVICES
from raftkv.replica.lease.on_leader import RENEW, SHORTEN
from raftkv.rpc.server.router import Kind
from raftkv.rpc.shares import identity_of
from raftkv.rpc.status import RpcError
from raftkv.server.auth import guard
from raftkv.server.auth.guard import AHEAD_CALLS_MAX
from raftkv.server.auth.simple_tokens import digest_of
from raftkv.server.auth.table import OPEN, TABLE, row_of
from tests.rpc.loop import until
from tests.server.auth.world import Call, World, stop

PUT, RANGE = "etcdserverpb.KV/Put", "etcdserverpb.KV/Range"
TXN = "etcdserverpb.KV/Txn"
NOBODY = (errors.INVALID_ARGUMENT, "etcdserver: user name is empty")
DENIED = (errors.PERMISSION_DENIED, "etcdserver: permission denied")
BAD_TOKEN = (errors.UNAUTHENTICATED, "etcdserver: invalid auth token")
LET_IN = (errors.OK, "")


def world_of_alice(leases: tuple[int, ...] = ()) -> World:
    world = World(leases)
    world.user("alice", ("READWRITE", b"a", b"b"))
    world.enable()
    return world


@pytest.fixture
@asynccontextmanager
async def world() -> AsyncIterator[World]:
    yield world_of_alice()


def put(key: bytes = b"a1") -> rpc_pb2.PutRequest:
    return rpc_pb2.PutRequest(key=key, value=b"v")


async def outcome(world: World, method: str, request: Any, token: str | None = None, **more: Any) -> tuple[int, str]:
    code, text, _ = await world.call(method, request, token, **more)
    return code, text


async def test_without_users_every_call_is_allowed() -> None:
    world = World()
    assert await outcome(world, PUT, put()) == LET_IN
    assert await outcome(world, PUT, put(), "no token of any user") == LET_IN


async def test_token_identifies_the_caller(world: World) -> None:
    token = world.token("alice")
    assert await outcome(world, PUT, put(), token) == LET_IN
    assert await outcome(world, PUT, put(b"b1"), token) == DENIED
    assert await outcome(world, PUT, put()) == NOBODY
    for wrong in ("", "x", "x.y", "x.1", token[1:], token + "0" * 99, token.swapcase(), "x" * 24 + ".1"):
        assert await outcome(world, PUT, put(), wrong) == BAD_TOKEN, wrong


async def test_a_token_may_come_as_authorization(world: World) -> None:
    token = world.token("alice")
    for value in (token, f"Bearer {token}"):
        assert await outcome(world, PUT, put(), headers={"authorization": value}) == LET_IN
    assert await outcome(world, PUT, put(), "x.1", headers={"authorization": token}) == BAD_TOKEN


async def test_certificate_identifies_caller_without_token(world: World) -> None:
    assert await outcome(world, PUT, put(), cn="alice") == LET_IN
    assert await outcome(world, PUT, put(b"b1"), cn="alice") == DENIED
    assert await outcome(world, PUT, put(), cn="stranger") == DENIED
    assert await outcome(world, PUT, put(), "x.1", cn="alice") == BAD_TOKEN
    # CVE-2018-16886: what a gateway passes on shows the gateway's own certificate.
    assert await outcome(world, PUT, put(), cn="alice", headers={"grpcgateway-accept": "*/*"}) == NOBODY


async def test_invalid_request_is_refused_before_rights_are_checked(world: World) -> None:
    empty = (errors.INVALID_ARGUMENT, "etcdserver: key is not provided")
    assert await outcome(world, PUT, put(b""), "x.1") == empty
    assert await outcome(world, RANGE, rpc_pb2.RangeRequest()) == empty


async def test_long_txn_is_authorized_like_a_short_one(world: World) -> None:
    token = world.token("alice")

    def txn(*keys: bytes) -> rpc_pb2.TxnRequest:
        return rpc_pb2.TxnRequest(success=[rpc_pb2.RequestOp(request_put=put(key + bytes(100))) for key in keys])

    many = [b"a%d" % number for number in range(100)]
    duplicate = (errors.INVALID_ARGUMENT, "etcdserver: duplicate key given in txn request")
    assert len(txn(*many).SerializeToString()) > guard.BYTES_AT_ONCE
    assert await outcome(world, TXN, txn(*many), token) == LET_IN
    assert await outcome(world, TXN, txn(*many, b"c"), token) == DENIED
    assert await outcome(world, TXN, txn(*many, b"a1"), "x.1") == duplicate
    assert await outcome(world, TXN, txn(*many), "x.1") == BAD_TOKEN
    assert await outcome(world, TXN, txn(*many)) == NOBODY
    secret = "y" * 24
    call = world.start(TXN, txn(*many), f"{secret}.{world.node.applied + 1}")
    await until(lambda: len(world.users.guard._waiting) == 1)
    world.node.applied += 1
    world.users.granted(b"alice", digest_of(secret.encode()), world.node.applied)
    await until(lambda: call.done)
    assert call.status == LET_IN


@pytest.mark.parametrize("key", [b"lock/1", b"secret"])
async def test_keys_of_a_lease_that_another_member_answers_with_are_checked(key: bytes) -> None:
    """It was attached since the call was let in."""
    world = World((100,))
    world.user("alice", ("READ", b"lock/", b"lock0"))
    world.enable()
    world.leases.of_leader = rpc_pb2.LeaseTimeToLiveResponse(ID=100, TTL=5, keys=[key]).SerializeToString()
    request = rpc_pb2.LeaseTimeToLiveRequest(ID=100, keys=True)
    call = world.start("etcdserverpb.Lease/LeaseTimeToLive", request, world.token("alice"))
    await until(lambda: call.done)
    assert call.status == (DENIED if key == b"secret" else LET_IN)
    if call.status == LET_IN:
        assert list(rpc_pb2.LeaseTimeToLiveResponse.FromString(call.answers[0]).keys) == [key]


@pytest.mark.parametrize("names", [[], [b"alice", b""]], ids=["earlier version", "this version"])
async def test_the_owner_of_a_lease_that_another_member_reports_is_a_user_or_none(names: list[bytes]) -> None:
    """A caller without a name would be a member, which may do everything."""
    world = World()
    request = raft_pb2.LeaseShortenRequest(ids=[1, 2], graces_ms=[5, 5], ages_us=[1, 1], users=names)
    request.auth_revisions.extend(9 for _ in names)
    handler = world.lease_service.for_members()[SHORTEN.path]
    await handler(request.SerializeToString(), cast(Any, None))
    callers = [one.caller for one in world.leases.lost]
    assert callers == ([Caller(b"alice", 9), None] if names else [None, None])


async def test_keep_alives_let_in_by_older_users_are_left_to_their_member(world: World) -> None:
    """A member that lagged renewed the leases of a user who was deleted, for as long as it lagged."""
    handler, present = world.lease_service.for_members()[RENEW.path], world.auth.revision
    for revision, asks_users, is_taken in (
        (present, True, True),
        (present + 1, True, True),  # this one lags
        (present - 1, True, False),
        (present, False, False),
        (0, False, True),  # an earlier version
    ):
        request = raft_pb2.LeaseRenewRequest(ids=[1, 2], auth_revision=revision, asks_users=asks_users)
        renewing = handler(request.SerializeToString(), cast(Any, None))
        if is_taken:
            assert list(raft_pb2.LeaseRenewResponse.FromString(b"".join(await renewing)).ttls) == [10, 10]
        else:
            with pytest.raises(RpcError, match="revision of auth store is old"):
                await renewing


@pytest.mark.parametrize("keys", [True, False])
async def test_time_to_live_by_another_member_waits_for_its_users(keys: bool) -> None:
    world = world_of_alice((200,))
    world.leases.of_leader = rpc_pb2.LeaseTimeToLiveResponse(ID=200, TTL=7).SerializeToString()
    world.node.is_held = True
    request = rpc_pb2.LeaseTimeToLiveRequest(ID=200, keys=keys)
    call = world.start("etcdserverpb.Lease/LeaseTimeToLive", request, world.token("alice"))
    await until(lambda: call.done or world.node.holds)
    assert not call.done
    world.change(user_delete=rpc_pb2.AuthUserDeleteRequest(name="alice"))
    world.node.let_go()
    await until(lambda: call.done)
    assert call.status == BAD_TOKEN


@pytest.mark.parametrize("is_foreign", [False, True])
async def test_leases_of_many_parts_are_checked_to_their_end(is_foreign: bool) -> None:
    world = World((100, 101))
    parts = [b"%03d" % number for number in range(0, 400, 2)]
    world.user("alice", ("READWRITE", b"lock/", b"lock0"), *(("READWRITE", key, b"") for key in parts))
    world.enable()
    for lease in (100, 101):
        for key in parts[lease % 2 :: 2]:
            world.put(key, lease=lease)
    if is_foreign:
        world.put(b"399", lease=100)
    token = world.token("alice")
    expected = DENIED if is_foreign else LET_IN
    time_to_live = rpc_pb2.LeaseTimeToLiveRequest(ID=100, keys=True)
    assert await outcome(world, "etcdserverpb.Lease/LeaseTimeToLive", time_to_live, token) == expected
    world.put(b"000", lease=100)  # what was found holds until a write
    assert await outcome(world, "etcdserverpb.Lease/LeaseLeases", rpc_pb2.LeaseLeasesRequest(), token) == expected
    world.put(b"000", lease=100)
    kept = world.start("etcdserverpb.Lease/LeaseKeepAlive", rpc_pb2.LeaseKeepAliveRequest(ID=100), token)
    await until(lambda: kept.answers or kept.done)
    assert [rpc_pb2.LeaseKeepAliveResponse.FromString(one).ID for one in kept.answers] == ([] if is_foreign else [100])
    assert kept.status == (DENIED if is_foreign else None)
    kept.abort(RpcError(errors.UNAVAILABLE, "gone"))
    world.put(b"000", lease=100)
    lock = lock_pb2.LockRequest(name=b"lock", lease=100)
    code, text = await outcome(world, "v3lockpb.Lock/Lock", lock, token)
    assert (code, text) == ((errors.UNKNOWN, DENIED[1]) if is_foreign else LET_IN)


async def test_a_token_whose_entry_is_not_applied_yet_is_waited_for(world: World) -> None:
    secret = "y" * 24
    call = world.start(PUT, put(), f"{secret}.{world.node.applied + 1}")
    stream = world.start(
        "etcdserverpb.KV/RangeStream", rpc_pb2.RangeRequest(key=b"a1"), f"{secret}.{world.node.applied + 1}"
    )
    await asyncio.sleep(0.01)
    assert not call.done
    world.node.applied += 1
    world.users.granted(b"alice", digest_of(secret.encode()), world.node.applied)
    async with asyncio.timeout(90):
        await call.over
        await stream.over
    assert (call.status, stream.status) == (LET_IN, LET_IN)


async def test_a_stream_without_a_task_waits_for_its_token_too() -> None:
    world = world_of_alice(leases=(100,))
    secret = "y" * 24
    token, request = f"{secret}.{world.node.applied + 1}", rpc_pb2.LeaseKeepAliveRequest(ID=100)
    kept, left = (world.start("etcdserverpb.Lease/LeaseKeepAlive", request, token) for _ in range(2))
    await asyncio.sleep(0.01)
    assert not kept.answers
    assert not kept.done
    left.abort(RpcError(errors.UNAVAILABLE, "gone"))
    world.node.applied += 1
    world.users.granted(b"alice", digest_of(secret.encode()), world.node.applied)
    await until(lambda: kept.answers or kept.done)
    assert [rpc_pb2.LeaseKeepAliveResponse.FromString(one).ID for one in kept.answers] == [100]
    assert not left.answers, "one that has left meanwhile is not listened to"
    assert len(world.users.live) == 1
    kept.abort(RpcError(errors.UNAVAILABLE, "gone"))
    assert len(world.users.live) == 0


async def test_tokens_of_the_future_are_waited_for_by_some_calls_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "AHEAD_MAX_S", 1.0)
    world = world_of_alice()
    token = "y" * 24 + ".99999999999999999999"
    watching = rpc_pb2.WatchRequest(create_request=rpc_pb2.WatchCreateRequest(key=b"a1"))
    ahead = [world.start(PUT, put(), token) for _ in range(AHEAD_CALLS_MAX - 1)]
    ahead.append(world.start("etcdserverpb.KV/RangeStream", rpc_pb2.RangeRequest(key=b"a1"), token))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    late = [
        world.start(PUT, put(), token),
        world.start("etcdserverpb.KV/RangeStream", rpc_pb2.RangeRequest(key=b"a1"), token),
    ]
    watch_call = world.start("etcdserverpb.Watch/Watch", watching, token)
    await until(lambda: all(call.done for call in ahead[:3]))
    assert not any(call.done for call in (*ahead[3:], *late)), "those that have waited longest give way"
    await until(lambda: all(call.done for call in (*ahead, *late)) and bool(watch_call.answers))
    assert {call.status for call in (*ahead, *late)} == {BAD_TOKEN}
    await stop(watch_call)


async def test_made_up_tokens_of_the_future_keep_no_call_of_another_address_out(world: World) -> None:
    ahead = [world.start(PUT, put(), "y" * 24 + ".99999999999999999999") for _ in range(AHEAD_CALLS_MAX)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    handled: list[Call] = []
    guarded = world.users.guard.around("/" + PUT, Kind.UNARY, lambda call, data: handled.append(call))
    honest = Call(((b"token", f"{'z' * 24}.{world.node.applied + 1}".encode()),))
    honest.peer.identity = "address 10.0.0.7"
    guarded(honest, put().SerializeToString())
    await until(lambda: ahead[0].done)
    for _ in range(10):
        world.start(PUT, put(), "x" * 24 + ".99999999999999999999")
    await until(lambda: sum(call.done for call in ahead) == 11)
    assert not honest.done, "those of the other address give way to each other"
    world.users.tokens.grant(b"alice", digest_of(b"z" * 24))
    world.node.applied += 1
    await until(lambda: handled == [honest])


async def test_a_waiting_call_is_answered_for_any_exception_of_its_handler(world: World) -> None:
    """A server answers for errors that handlers raise at once; after a wait no answer came, and clients waited for
    ever.
    """
    raised: list[Exception] = [RpcError(errors.FAILED_PRECONDITION, "not today"), ZeroDivisionError("secret")]
    secrets = ["y" * 24, "z" * 24]

    def handle(call: Any, data: bytes) -> None:
        raise raised.pop(0)

    guarded = world.users.guard.around("/" + PUT, Kind.UNARY, handle)
    calls = []
    for secret in secrets:
        headers = ((b"token", f"{secret}.{world.node.applied + 2}".encode()),)
        calls.append(Call(headers))
        guarded(calls[-1], put().SerializeToString())
    await until(lambda: len(world.users.guard._waiting) == 2)
    for secret in secrets:
        world.node.applied += 1
        world.users.granted(b"alice", digest_of(secret.encode()), world.node.applied)
    await until(lambda: all(call.done for call in calls))
    assert {call.status for call in calls} == {
        (errors.FAILED_PRECONDITION, "not today"),
        (errors.INTERNAL, "internal error"),
    }


async def test_a_read_that_waited_is_checked_again(world: World) -> None:
    token = world.token("alice")
    world.node.is_held = True
    calls = [
        world.start(RANGE, rpc_pb2.RangeRequest(key=b"a1"), token),
        world.start("etcdserverpb.KV/Txn", rpc_pb2.TxnRequest(compare=[rpc_pb2.Compare(key=b"a1")]), token),
    ]
    world.change(role_delete=rpc_pb2.AuthRoleDeleteRequest(role="role-alice"))
    world.node.let_go()
    assert [call.status for call in calls] == [DENIED, DENIED]


async def test_names_that_no_user_has_get_no_share_of_their_own(world: World) -> None:
    """Certificates and signed tokens may name anyone: each made-up name had a share of what waits for its turn."""
    calls = [world.start(PUT, put(), cn=name) for name in ("alice", "made-up-1", "made-up-2")]
    assert [identity_of(call) for call in calls] == [b"alice", "address 10.0.0.1", "address 10.0.0.1"]
    assert all(call.status is not None for call in calls[1:])


async def test_only_a_proxy_with_the_role_root_names_its_clients(world: World) -> None:
    """Each name that any other user invented would have a share of its own."""
    found = []
    for user, name in [("root", "team-a"), ("root", ""), ("root", "n" * 129), ("alice", "team-a")]:
        call = world.start(PUT, put(), world.token(user), headers={"raftkv-client": name})
        found.append(identity_of(call))
    assert found == [b"root/team-a", b"root", b"root", b"alice"]


async def test_a_connection_is_its_user_s_or_its_address_while_users_are_on() -> None:
    world = World()
    world.user("alice", ("READWRITE", b"a", b"b"))
    identify, alice, other = (
        world.users.guard.identify,
        *({"subject": ((("commonName", name),),)} for name in ("alice", "made-up")),
    )
    shown = [alice, other, None]
    named = [identify("10.0.0.1:5", one) for one in shown]
    assert named == ["certificate alice", "certificate made-up", "address 10.0.0.1"]
    world.enable()
    assert [identify("10.0.0.1:5", one) for one in shown] == [b"alice", "address 10.0.0.1", "address 10.0.0.1"]


async def test_a_write_that_waited_is_checked_again(world: World) -> None:
    token = world.token("alice")
    world.node.is_held = True
    call = world.start(PUT, put(), token)
    world.change(role_delete=rpc_pb2.AuthRoleDeleteRequest(role="role-alice"))
    world.node.let_go()
    assert call.status == (errors.INVALID_ARGUMENT, "etcdserver: revision of auth store is old")
    assert world.machine.store.revision == 1


def test_every_method_of_the_client_ports_has_a_row_and_no_other_has() -> None:
    served = {name: set(methods) for name, methods in SERVICES.items() if name != "raftkvpb.Peer"}
    assert {name: set(rows) for name, rows in TABLE.items()} == served


def test_a_method_without_a_row_stops_the_start() -> None:
    with pytest.raises(errors.ConfigError, match=r"^/pkg.New/Method has no row in raftkv.server.auth.table, which"):
        row_of("/pkg.New/Method")


def test_open_methods_are_listed() -> None:
    found = {f"{service}/{name}" for service, rows in TABLE.items() for name, row in rows.items() if row is OPEN}
    health = {f"grpc.health.v1.Health/{name}" for name in ("Check", "List", "Watch")}
    assert found == {"etcdserverpb.Auth/Authenticate", *health}


async def test_an_open_method_is_not_wrapped() -> None:
    def handler(call: object, data: bytes) -> None:
        raise AssertionError

    around = World().users.guard.around
    assert around("/grpc.health.v1.Health/Check", Kind.UNARY, handler) is handler


async def test_a_watch_ends_with_the_right_to_it(world: World) -> None:
    call = world.start("etcdserverpb.Watch/Watch", watch(b"a1", b""), world.token("alice"))
    call.ask(watch(b"a", b"\0"))
    call.ask(watch(b"b", b""))
    await settled(call, 3)
    first, second, third = answers(call)
    assert (first.created, first.canceled, first.watch_id) == (True, False, 0)
    reason = "rpc error: code = PermissionDenied desc = etcdserver: permission denied"
    for refused in (second, third):
        assert (refused.created, refused.canceled, refused.watch_id, refused.cancel_reason) == (True, True, -1, reason)
    world.change(role_delete=rpc_pb2.AuthRoleDeleteRequest(role="role-alice"))
    # What is written in the same turn, after the right went, is not for the watcher.
    world.put(b"a1")
    world.node.let_go()
    await settled(call, 4)
    last = answers(call)[-1]
    assert (last.canceled, last.watch_id, last.cancel_reason, len(last.events)) == (True, 0, reason, 0)
    await stop(call)


async def test_an_ended_watch_is_freed_without_the_collector(world: World) -> None:
    gc.collect()
    gc.disable()
    try:
        call = world.start("etcdserverpb.Watch/Watch", watch(b"a1", b""), world.token("alice"))
        await settled(call, 1)
        live = weakref.ref(world.users.live.of(call))
        await stop(call)
        del call
        await asyncio.sleep(0)
        assert live() is None
    finally:
        gc.enable()


def watch(key: bytes, range_end: bytes) -> rpc_pb2.WatchRequest:
    return rpc_pb2.WatchRequest(create_request=rpc_pb2.WatchCreateRequest(key=key, range_end=range_end))


def answers(call: Any) -> list[rpc_pb2.WatchResponse]:
    return [rpc_pb2.WatchResponse.FromString(answer) for answer in call.answers]


async def settled(call: Any, count: int) -> None:
    await until(lambda: len(call.answers) >= count)
