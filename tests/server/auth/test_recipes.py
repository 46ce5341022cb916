"""Locks, elections and Horovod act as their caller: without rights to the keys calls are refused and waits end."""

from __future__ import annotations

import pytest

from raftkv import errors
from raftkv.apply.wire import Kind
from raftkv.integrations.horovod import extension
from raftkv.pb import election_pb2, lock_pb2, rpc_pb2
from raftkv.rpc.server.http import HttpRequest, HttpResponse
from tests.rpc.loop import until
from tests.server.auth.test_guard import BAD_TOKEN, DENIED, LET_IN, NOBODY, outcome
from tests.server.auth.world import World

LOCK, CAMPAIGN, OBSERVE = "v3lockpb.Lock/Lock", "v3electionpb.Election/Campaign", "v3electionpb.Election/Observe"
REFUSED_NOBODY, REFUSED = (errors.UNKNOWN, NOBODY[1]), (errors.UNKNOWN, DENIED[1])
"""What etcd says, too, whose recipes are clients inside it."""
SCOPES = b"/raftkv/horovod/run-1/"


def team() -> World:
    """Alice may use the queue "q"; Bob may read it."""
    world = World()
    world.user("alice", ("READWRITE", b"q/", b"q0"))
    world.user("bob", ("READ", b"q/", b"q0"))
    world.enable()
    return world


def without_rights(world: World) -> None:
    world.change(role_delete=rpc_pb2.AuthRoleDeleteRequest(role="role-alice"))
    world.node.let_go()


async def test_lock_requires_write_right_on_its_keys() -> None:
    world = team()
    alice, bob = world.token("alice"), world.token("bob")
    request = lock_pb2.LockRequest(name=b"q", lease=200)
    assert await outcome(world, LOCK, request) == REFUSED_NOBODY
    assert await outcome(world, LOCK, request, bob) == REFUSED
    assert await outcome(world, LOCK, lock_pb2.LockRequest(name=b"r", lease=200), alice) == REFUSED
    assert await outcome(world, LOCK, request, alice) == LET_IN
    assert await outcome(world, "v3lockpb.Lock/Unlock", lock_pb2.UnlockRequest(key=b"q/c8"), bob) == REFUSED
    assert await outcome(world, "v3lockpb.Lock/Unlock", lock_pb2.UnlockRequest(key=b"q/c8"), alice) == LET_IN


async def test_the_lease_of_a_lock_may_hold_no_key_of_others() -> None:
    world = team()
    world.put(b"secret", b"", 200)
    alice = world.token("alice")
    assert await outcome(world, LOCK, lock_pb2.LockRequest(name=b"q", lease=200), alice) == REFUSED
    campaign = election_pb2.CampaignRequest(name=b"q", lease=200, value=b"v")
    assert await outcome(world, CAMPAIGN, campaign, alice) == REFUSED


@pytest.mark.parametrize("how", ["right", "user", "token"])
async def test_a_wait_for_a_lock_ends_with_the_right_the_user_or_the_token(how: str) -> None:
    world = team()
    alice = world.token("alice")
    assert await outcome(world, LOCK, lock_pb2.LockRequest(name=b"q", lease=200), alice) == LET_IN
    call = world.start(LOCK, lock_pb2.LockRequest(name=b"q", lease=201), alice)
    await until(lambda: world.machine.store.get(b"q/c9") is not None)
    assert not call.done
    if how == "right":
        without_rights(world)
    elif how == "user":
        world.change(user_delete=rpc_pb2.AuthUserDeleteRequest(name="alice"))
        world.node.let_go()
    else:
        world.change(user_change_password=rpc_pb2.AuthUserChangePasswordRequest(name="alice"))
        world.node.let_go()
    await until(lambda: call.done)
    assert call.status == (REFUSED if how == "right" else BAD_TOKEN)
    # The waiter's key goes too: others do not wait for it.
    await until(lambda: world.machine.store.get(b"q/c9") is None)
    await until(lambda: len(world.users.live) == 0)


async def test_joining_the_wait_of_another_takes_the_right_to_end_it() -> None:
    """Both show one lease, so they wait by one key, which the first has made."""
    world = team()
    world.user("carol", ("READWRITE", b"q/", b"q0"))
    alice, carol = world.token("alice"), world.token("carol")
    assert await outcome(world, LOCK, lock_pb2.LockRequest(name=b"q", lease=200), alice) == LET_IN
    waiting = world.start(LOCK, lock_pb2.LockRequest(name=b"q", lease=201), carol)
    await until(lambda: world.machine.store.get(b"q/c9") is not None)
    joined = world.start(LOCK, lock_pb2.LockRequest(name=b"q", lease=201), alice)
    await until(lambda: world.recipe.waiting == 2)
    without_rights(world)
    await until(lambda: joined.done)
    assert joined.status == REFUSED
    await until(lambda: not world.recipe.deleting)
    assert world.machine.store.get(b"q/c9") is not None
    assert not waiting.done
    world.entry(Kind.DELETE_RANGE, rpc_pb2.DeleteRangeRequest(key=b"q/c8").SerializeToString())
    world.node.let_go()
    await until(lambda: waiting.done)
    assert waiting.status == LET_IN


async def test_an_observer_is_cut_off_with_the_right() -> None:
    world = team()
    call = world.start(OBSERVE, election_pb2.LeaderRequest(name=b"q"), world.token("alice"))
    refused = world.start(OBSERVE, election_pb2.LeaderRequest(name=b"r"), world.token("alice"))
    await until(lambda: refused.done)
    assert refused.status == REFUSED
    world.put(b"q/1", b"leader")
    world.node.let_go()
    await until(lambda: len(call.answers) == 1)
    without_rights(world)
    await until(lambda: call.done)
    assert call.status == REFUSED


async def answer(world: World, method: str, target: str, body: bytes = b"", user: bytes = b"", **headers: str) -> int:
    """The status; the answer must be known to be the user's."""

    async def otherwise(request: HttpRequest) -> HttpResponse:
        return HttpResponse(418)

    handle = extension("run-1")(world.recipe, otherwise)
    response = await handle(HttpRequest(method, target, tuple(headers.items()), body, identity="address 10.0.0.9"))
    assert response.user == user
    return response.status


async def test_horovod_acts_as_its_caller() -> None:
    world = World()
    assert await answer(world, "PUT", "/global/0", b"x") == 200
    assert world.node.identities == ["address 10.0.0.9"], "in whose share it falls"
    world.user(
        "alice", ("READWRITE", SCOPES, SCOPES[:-1] + b"0"), ("READ", b"/raftkv/runs/run-1/", b"/raftkv/runs/run-10")
    )
    world.user("bob", ("READWRITE", b"/raftkv/horovod/run-2/", b"/raftkv/horovod/run-20"))
    world.permit("role-alice", "READ", b"/raftkv/", b"/raftkv0")
    world.enable()
    alice, bob = world.token("alice"), world.token("bob")
    for method, target in (("PUT", "/global/0"), ("GET", "/global/0"), ("DELETE", "/global/0")):
        assert await answer(world, method, target, b"x") == 401
        assert await answer(world, method, target, b"x", authorization="x.1") == 401
        assert await answer(world, method, target, b"x", user=b"bob", authorization=f"Bearer {bob}") == 403
        assert await answer(world, method, target, b"x", user=b"alice", authorization=f"Bearer {alice}") == 200
    assert set(world.node.identities[1:]) == {b"alice"}
    assert await answer(world, "GET", "/rank_and_size/host:0") == 401
    assert await answer(world, "GET", "/metrics") == 418
