"""The Auth service: login, changes, queries, and secrecy of passwords."""

from __future__ import annotations

import asyncio
import base64
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import bcrypt
import jwt
import pytest

from raftkv import errors
from raftkv.pb import auth_pb2, rpc_pb2
from raftkv.server.auth import guard
from raftkv.server.auth.jwt_tokens import PASSWORD, digest_of
from tests.rpc.attacks.test_work_of_a_read import Turns
from tests.rpc.loop import until
from tests.server.auth.test_guard import BAD_TOKEN, DENIED, LET_IN, NOBODY, outcome, put, settled, watch
from tests.server.auth.world import World

AUTH = "etcdserverpb.Auth"
CANARY = "canary-in-a-coal-mine"
SECRET = b"x" * 32
FAILED = (errors.INVALID_ARGUMENT, "etcdserver: authentication failed, invalid user ID or password")


async def with_passwords(**settings: Any) -> World:
    """Root and Alice, who have passwords, and Bob, who has none."""
    world = World(**settings)
    for name in ("root", "alice"):
        request = rpc_pb2.AuthUserAddRequest(name=name, password=f"{CANARY}-{name}")
        assert await outcome(world, f"{AUTH}/UserAdd", request) == LET_IN
    world.change(user_grant_role=rpc_pb2.AuthUserGrantRoleRequest(user="root", role="root"))
    world.change(role_add=rpc_pb2.AuthRoleAddRequest(name="a"))
    world.permit("a", "READWRITE", b"a", b"b")
    world.change(user_grant_role=rpc_pb2.AuthUserGrantRoleRequest(user="alice", role="a"))
    world.user("bob", role="a")
    world.enable()
    return world


@pytest.fixture
@asynccontextmanager
async def world() -> AsyncIterator[World]:
    yield await with_passwords()


def login(name: str, password: str | None = None) -> rpc_pb2.AuthenticateRequest:
    return rpc_pb2.AuthenticateRequest(name=name, password=f"{CANARY}-{name}" if password is None else password)


async def token_of(world: World, name: str) -> str:
    code, text, answer = await world.call(f"{AUTH}/Authenticate", login(name))
    assert (code, text) == LET_IN
    token: str = answer.token
    return token


async def test_a_password_gives_a_token(world: World) -> None:
    token = await token_of(world, "alice")
    assert int(token.partition(".")[2]) == world.node.applied
    assert await outcome(world, "etcdserverpb.KV/Put", put(), token) == LET_IN
    assert await token_of(world, "alice") != token


async def test_refused_logins_look_and_cost_the_same(world: World) -> None:
    passwords: Any = world.users.passwords
    real, worked = passwords.matches, []

    async def matches(password: str, hashed: bytes | int, *whose: Any) -> bool:
        worked.append(hashed if isinstance(hashed, int) else int(hashed[4:6]))
        return bool(await real(password, hashed, *whose))

    passwords.matches = matches
    # Other costs than that of new hashes: bob has no password, nobody is unknown.
    for name in ("root", "alice"):
        hashed = base64.b64encode(bcrypt.hashpw(b"right", bcrypt.gensalt(6))).decode()
        world.change(user_change_password=rpc_pb2.AuthUserChangePasswordRequest(name=name, hashedPassword=hashed))
    asked = (("alice", "wrong"), ("nobody", "x"), ("alice", ""), ("", "x"), ("bob", "x"), ("bob", ""))
    for name, password in asked:
        assert await outcome(world, f"{AUTH}/Authenticate", login(name, password)) == FAILED
    assert worked == [6] * len(asked)
    off = (errors.FAILED_PRECONDITION, "etcdserver: authentication is not enabled")
    assert await outcome(World(), f"{AUTH}/Authenticate", login("alice", "x")) == off


async def test_changed_users_cost_a_second_comparison_only_for_a_new_password(world: World) -> None:
    compared = 0
    passwords: Any = world.users.passwords
    real = passwords.matches

    async def matches(password: str, hashed: bytes | int, *whose: Any) -> bool:
        nonlocal compared
        compared += 1
        if compared == 1:
            world.change(role_add=rpc_pb2.AuthRoleAddRequest(name="new"))
        found: bool = await real(password, hashed, *whose)
        return found

    passwords.matches = matches
    await token_of(world, "alice")
    assert compared == 1

    async def changing(password: str, hashed: bytes | int, *whose: Any) -> bool:
        found: bool = await real(password, hashed, *whose)
        new = base64.b64encode(bcrypt.hashpw(b"new", bcrypt.gensalt(4))).decode()
        change = rpc_pb2.AuthUserChangePasswordRequest(name="alice", hashedPassword=new)
        world.change(user_change_password=change)
        return found

    passwords.matches = changing
    assert await outcome(world, f"{AUTH}/Authenticate", login("alice")) == FAILED


async def test_a_new_password_ends_the_tokens(world: World) -> None:
    token, root = await token_of(world, "alice"), await token_of(world, "root")
    change = rpc_pb2.AuthUserChangePasswordRequest(name="alice", password="new")
    assert await outcome(world, f"{AUTH}/UserChangePassword", change, token) == DENIED
    assert await outcome(world, f"{AUTH}/UserChangePassword", change, root) == LET_IN
    assert await outcome(world, "etcdserverpb.KV/Put", put(), token) == BAD_TOKEN
    assert await outcome(world, f"{AUTH}/Authenticate", login("alice")) == FAILED
    assert await outcome(world, f"{AUTH}/Authenticate", login("alice", "new")) == LET_IN


async def test_after_a_change_to_no_password_none_is_right(world: World) -> None:
    """An empty one must not be: the name alone would let a caller in."""
    root = await token_of(world, "root")
    change = rpc_pb2.AuthUserChangePasswordRequest(name="alice")
    assert await outcome(world, f"{AUTH}/UserChangePassword", change, root) == LET_IN
    for password in ("", f"{CANARY}-alice"):
        assert await outcome(world, f"{AUTH}/Authenticate", login("alice", password)) == FAILED
    change.password = "new"
    assert await outcome(world, f"{AUTH}/UserChangePassword", change, root) == LET_IN
    assert await outcome(world, f"{AUTH}/Authenticate", login("alice", "new")) == LET_IN


async def test_disabling_ends_all_tokens(world: World) -> None:
    root = await token_of(world, "root")
    assert await outcome(world, f"{AUTH}/AuthDisable", rpc_pb2.AuthDisableRequest(), root) == LET_IN
    assert await outcome(world, "etcdserverpb.KV/Put", put()) == LET_IN
    world.enable()
    assert await outcome(world, "etcdserverpb.KV/Put", put(), root) == BAD_TOKEN


async def test_changes_that_are_made_at_once_all_happen(world: World) -> None:
    root = await token_of(world, "root")
    calls = [world.call(f"{AUTH}/RoleAdd", rpc_pb2.AuthRoleAddRequest(name=f"r{number}"), root) for number in range(20)]
    assert [(code, text) for code, text, _ in await asyncio.gather(*calls)] == [LET_IN] * 20


async def test_users_see_themselves_and_their_roles(world: World) -> None:
    alice = await token_of(world, "alice")
    _, _, answer = await world.call(f"{AUTH}/UserGet", rpc_pb2.AuthUserGetRequest(name="alice"), alice)
    assert list(answer.roles) == ["a"]
    _, _, answer = await world.call(f"{AUTH}/RoleGet", rpc_pb2.AuthRoleGetRequest(role="a"), alice)
    assert list(answer.perm) == [auth_pb2.Permission(permType="READWRITE", key=b"a", range_end=b"b")]
    for method, request in (
        ("UserGet", rpc_pb2.AuthUserGetRequest(name="root")),
        ("UserGet", rpc_pb2.AuthUserGetRequest(name="nobody")),
        ("RoleGet", rpc_pb2.AuthRoleGetRequest(role="root")),
        ("RoleGet", rpc_pb2.AuthRoleGetRequest(role="none")),
        ("UserList", rpc_pb2.AuthUserListRequest()),
        ("RoleList", rpc_pb2.AuthRoleListRequest()),
    ):
        assert await outcome(world, f"{AUTH}/{method}", request, alice) == DENIED, method
        assert await outcome(world, f"{AUTH}/{method}", request) == NOBODY, method


async def test_auth_status_needs_no_rights(world: World) -> None:
    """Neither needs a token, as in etcd 3.7, but a token that is shown must be good."""
    _, _, status = await world.call(f"{AUTH}/AuthStatus", rpc_pb2.AuthStatusRequest())
    assert (status.enabled, status.authRevision) == (True, world.auth.revision)
    nothing = ("etcdserverpb.KV/Txn", rpc_pb2.TxnRequest())
    for path, request in ((f"{AUTH}/AuthStatus", rpc_pb2.AuthStatusRequest()), nothing):
        assert await outcome(world, path, request) == LET_IN
        assert await outcome(world, path, request, "no.token") == BAD_TOKEN


async def test_the_role_root_is_shown_with_all_keys(world: World) -> None:
    root = await token_of(world, "root")
    assert await outcome(world, f"{AUTH}/RoleAdd", rpc_pb2.AuthRoleAddRequest(name="root"), root) == LET_IN
    _, _, answer = await world.call(f"{AUTH}/RoleGet", rpc_pb2.AuthRoleGetRequest(role="root"), root)
    assert list(answer.perm) == [auth_pb2.Permission(permType="READWRITE", range_end=b"\0")]


async def test_root_sees_all(world: World) -> None:
    root = await token_of(world, "root")
    _, _, users = await world.call(f"{AUTH}/UserList", rpc_pb2.AuthUserListRequest(), root)
    _, _, roles = await world.call(f"{AUTH}/RoleList", rpc_pb2.AuthRoleListRequest(), root)
    _, _, status = await world.call(f"{AUTH}/AuthStatus", rpc_pb2.AuthStatusRequest(), root)
    assert (list(users.users), list(roles.roles)) == (["alice", "bob", "root"], ["a"])
    assert (status.enabled, status.authRevision) == (True, world.auth.revision)
    missing = rpc_pb2.AuthRoleGetRequest(role="root")
    not_found = (errors.FAILED_PRECONDITION, "etcdserver: role name not found")
    assert await outcome(world, f"{AUTH}/RoleGet", missing, root) == not_found


async def test_a_hash_may_come_in_place_of_a_password() -> None:
    world = World()
    hashed = base64.b64encode(bcrypt.hashpw(b"x", bcrypt.gensalt(4, b"2a"))).decode()
    request = rpc_pb2.AuthUserAddRequest(name="carol", hashedPassword=hashed)
    assert await outcome(world, f"{AUTH}/UserAdd", request) == LET_IN
    assert bcrypt.checkpw(b"x", world.auth.users[b"carol"].password_hash)
    for wrong in ("no base64!", base64.b64encode(b"x").decode(), base64.b64encode(b"$2a$31$" + b"x" * 53).decode()):
        request = rpc_pb2.AuthUserAddRequest(name="dave", hashedPassword=wrong)
        code, text = await outcome(world, f"{AUTH}/UserAdd", request)
        assert (code, text.partition(" must be ")[0]) == (errors.INVALID_ARGUMENT, "raftkv: hashedPassword")


async def test_no_password_and_no_token_is_in_any_entry_or_record_or_text() -> None:
    world = World()
    entries: list[bytes] = []
    apply = world.node.apply

    def noting(kind: int, body: bytes) -> Any:
        entries.append(body)
        return apply(kind, body)

    node: Any = world.node
    node.apply = noting
    await outcome(world, f"{AUTH}/UserAdd", rpc_pb2.AuthUserAddRequest(name="root", password=f"{CANARY}-root"))
    world.change(user_grant_role=rpc_pb2.AuthUserGrantRoleRequest(user="root", role="root"))
    world.enable()
    token = await token_of(world, "root")
    change = rpc_pb2.AuthUserChangePasswordRequest(name="root", password=f"{CANARY}-new")
    assert await outcome(world, f"{AUTH}/UserChangePassword", change, token) == LET_IN
    kept = (
        b"".join(entries)
        + repr([dict(each) for each in world.machine.backend.__dict__.values() if isinstance(each, dict)]).encode()
    )
    assert CANARY.encode() not in kept
    assert token.partition(".")[0].encode() not in kept
    assert CANARY not in repr(world.users.__dict__) + repr(world.auth.users)


async def test_a_short_password_is_refused_where_a_length_is_set() -> None:
    world = World(auth_min_password_length=8)
    request = rpc_pb2.AuthUserAddRequest(name="alice", password="canary7")
    code, text = await outcome(world, f"{AUTH}/UserAdd", request)
    assert (code, text) == (errors.INVALID_ARGUMENT, "raftkv: a password must have at least 8 characters")


async def test_anonymous_streams_end_when_auth_is_enabled() -> None:
    world = World()
    keeping = world.start("etcdserverpb.Lease/LeaseKeepAlive", rpc_pb2.LeaseKeepAliveRequest(ID=200))
    watching = world.start(
        "etcdserverpb.Watch/Watch", rpc_pb2.WatchRequest(create_request=rpc_pb2.WatchCreateRequest(key=b"a"))
    )
    await until(lambda: len(keeping.answers) == len(watching.answers) == 1)
    world.enable()
    world.node.let_go()
    await until(lambda: keeping.done and len(watching.answers) == 2)
    assert keeping.status == NOBODY
    last = rpc_pb2.WatchResponse.FromString(watching.answers[-1])
    assert last.cancel_reason == "rpc error: code = InvalidArgument desc = etcdserver: user name is empty"


async def test_a_call_that_cannot_be_looked_at_ends_and_the_others_are_looked_at() -> None:
    world = World()
    create = rpc_pb2.WatchCreateRequest(key=b"a")
    watching = world.start("etcdserverpb.Watch/Watch", rpc_pb2.WatchRequest(create_request=create))
    keeping = world.start("etcdserverpb.Lease/LeaseKeepAlive", rpc_pb2.LeaseKeepAliveRequest(ID=200))
    await until(lambda: len(keeping.answers) == len(watching.answers) == 1)

    def recheck(refusal: object) -> Iterator[None]:
        yield
        raise ZeroDivisionError

    world.users.live.of(watching).recheck = recheck
    world.enable()
    world.node.let_go()
    await until(lambda: keeping.done and watching.done)
    assert keeping.status == NOBODY
    assert watching.status == (errors.INTERNAL, "internal error")


def signing(folder: Path, ttl: str) -> dict[str, str]:
    """The settings of a member whose tokens are signed."""
    secret = folder / "secret"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    return {"auth_token": f"jwt,priv-key={secret},sign-method=HS256,ttl={ttl}"}


def signing_world(folder: Path, ttl: str = "1s") -> World:
    """A member whose tokens are signed, and end after a second or another time."""
    world = World(**signing(folder, ttl))
    world.user("alice", ("READWRITE", b"a", b"b"))
    world.enable()
    return world


@pytest.mark.parametrize("method", ["etcdserverpb.Lease/LeaseKeepAlive", "etcdserverpb.Watch/Watch"])
async def test_streams_end_with_a_signed_token(tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [time.time()]
    monkeypatch.setattr(time, "time", lambda: now[0])  # it stands, so that a slow machine is in time
    world = signing_world(tmp_path)
    signer: Any = world.users._signed
    request: Any = rpc_pb2.LeaseKeepAliveRequest(ID=200)
    if method.endswith("Watch"):
        request = rpc_pb2.WatchRequest(create_request=rpc_pb2.WatchCreateRequest(key=b"a1"))
    call = world.start(method, request, signer.sign(b"alice", world.auth.revision, b""))
    await until(lambda: len(call.answers) == 1)
    # Users change, and the token is old: what is under way goes on, until the token ends.
    world.change(role_add=rpc_pb2.AuthRoleAddRequest(name="new"))
    world.node.let_go()
    assert not call.done
    now[0] += 1
    await until(lambda: call.done or len(call.answers) == 2)
    if method.endswith("Watch"):
        last = rpc_pb2.WatchResponse.FromString(call.answers[-1])
        assert last.cancel_reason == "rpc error: code = Unauthenticated desc = etcdserver: invalid auth token"
    else:
        assert call.status == BAD_TOKEN
    # A stream of watches outlasts its token, and is not looked at again for it.
    live = world.users.live
    assert [live.of(each)._timer for each in live._calls] == [None] * (not call.done)


@pytest.mark.parametrize("by_another", [False, True], ids=["of raftkv", "of etcd"])
async def test_signed_token_ends_with_the_password_that_it_was_given_for(tmp_path: Path, by_another: bool) -> None:
    """One that is stolen from root lets a thief make users of the role root; etcd's tokens do not name a password."""
    world = await with_passwords(**signing(tmp_path, "5m"))
    token = await token_of(world, "root")
    if by_another:
        claims = jwt.decode(token, SECRET, algorithms=["HS256"])
        del claims[PASSWORD]
        token = jwt.encode(claims, SECRET, algorithm="HS256")
    call = world.start("etcdserverpb.Watch/Watch", watch(b"a1", b""), token)
    await settled(call, 1)
    add = rpc_pb2.AuthRoleAddRequest
    assert await outcome(world, f"{AUTH}/RoleAdd", add(name="thief-1"), token) == LET_IN
    hashed = base64.b64encode(bcrypt.hashpw(f"{CANARY}-root".encode(), bcrypt.gensalt(4))).decode()
    world.change(user_change_password=rpc_pb2.AuthUserChangePasswordRequest(name="root", hashedPassword=hashed))
    world.put(b"a1")
    world.node.let_go()
    await settled(call, 2)
    ended = rpc_pb2.WatchResponse.FromString(call.answers[1]).canceled
    refused = await outcome(world, f"{AUTH}/RoleAdd", add(name="thief-2"), token)
    assert (ended, refused) == ((False, LET_IN) if by_another else (True, BAD_TOKEN))
    assert await outcome(world, f"{AUTH}/RoleAdd", add(name="b"), await token_of(world, "root")) == LET_IN


async def test_calls_of_deleted_user_end_despite_a_new_namesake(tmp_path: Path) -> None:
    """A signed token knows nothing of it, and both changes may be applied before the calls are looked at."""
    world = signing_world(tmp_path, ttl="5m")
    signer: Any = world.users._signed
    request = rpc_pb2.WatchRequest(create_request=rpc_pb2.WatchCreateRequest(key=b"a1"))
    call = world.start("etcdserverpb.Watch/Watch", request, signer.sign(b"alice", world.auth.revision, b""))
    await until(lambda: len(call.answers) == 1)
    world.change(user_delete=rpc_pb2.AuthUserDeleteRequest(name="alice"))
    world.user("alice", role="role-alice")
    world.put(b"a1", b"for the new alice")
    world.node.let_go()
    async with asyncio.timeout(90):
        await until(lambda: rpc_pb2.WatchResponse.FromString(call.answers[-1]).canceled)
    assert not any(rpc_pb2.WatchResponse.FromString(answer).events for answer in call.answers)
    again = world.start("etcdserverpb.Watch/Watch", request, signer.sign(b"alice", world.auth.revision, b""))
    await until(lambda: len(again.answers) == 1)
    world.user("bob")
    world.put(b"a1")
    world.node.let_go()
    await until(lambda: len(again.answers) == 2)
    assert rpc_pb2.WatchResponse.FromString(again.answers[1]).events


async def test_token_end_is_handled_in_slices(tmp_path: Path) -> None:
    """Tokens end at full seconds, and a client has thousands of streams and watchers with one."""
    world = signing_world(tmp_path, "1h")
    signer: Any = world.users._signed
    request = rpc_pb2.WatchRequest(create_request=rpc_pb2.WatchCreateRequest(key=b"a1"))
    call = world.start("etcdserverpb.Watch/Watch", request, signer.sign(b"alice", world.auth.revision, b""))
    await until(lambda: len(call.answers) == 1)
    turns = Turns()
    by_turn: Counter[int] = Counter()

    def recheck(refusal: object) -> Iterator[None]:
        for _ in range(50):
            until_s = time.perf_counter() + 0.001
            while time.perf_counter() < until_s:
                pass
            by_turn[turns.number] += 1
            yield

    live = world.users.live.of(call)
    live.recheck = recheck
    world.users.live.look_at(live)
    await until(lambda: by_turn.total() >= 50)
    assert max(by_turn.values()) < 50
    turns.stop()


@pytest.mark.parametrize("by_another", [False, True], ids=["of raftkv", "of etcd"])
async def test_signed_token_of_users_that_are_not_here_waits_for_them(tmp_path, by_another, monkeypatch):
    """Refuse it after the restore of an older backup, which has no password to compare with: it was valid there."""
    world = await with_passwords(**signing(tmp_path, "5m"))
    add = rpc_pb2.AuthRoleAddRequest
    expires_at = int(time.time()) + 300

    def token(ahead: int) -> str:
        claims = {"username": "root", "revision": world.auth.revision + ahead, "exp": expires_at}
        password = {} if by_another else {PASSWORD: digest_of(world.auth.users[b"root"].password_hash)}
        return jwt.encode({**claims, **password}, SECRET, algorithm="HS256")

    monkeypatch.setattr(guard, "AHEAD_MAX_S", 90.0)
    waiting = asyncio.create_task(outcome(world, f"{AUTH}/RoleAdd", add(name="behind"), token(1)))
    for _ in range(100):
        await asyncio.sleep(0)
    if not by_another:
        assert not waiting.done()
        world.change(role_add=add(name="newer"))
    assert await waiting == LET_IN
    monkeypatch.setattr(guard, "AHEAD_MAX_S", 0.01)
    expected = LET_IN if by_another else BAD_TOKEN
    assert await outcome(world, f"{AUTH}/RoleAdd", add(name="restored"), token(1_000)) == expected
