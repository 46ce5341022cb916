"""Every method x keys touched x role x kind of credential: admitted or refused as in ``oracle``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jwt
import pytest

from raftkv import errors
from raftkv.apply import wire
from raftkv.apply.wire import Caller, Kind
from raftkv.pb import rpc_pb2
from raftkv.pb.services import SERVICES
from tests.rpc.loop import until
from tests.server.auth.cases import LEASES, Case, cases
from tests.server.auth.oracle import ROLES, Role, is_allowed
from tests.server.auth.test_guard import BAD_TOKEN, DENIED, LET_IN, NOBODY
from tests.server.auth.world import Call, World, stop

OLD = (errors.INVALID_ARGUMENT, "etcdserver: revision of auth store is old")
REFUSALS = {BAD_TOKEN[1]: BAD_TOKEN, DENIED[1]: DENIED, NOBODY[1]: NOBODY, OLD[1]: OLD}
SECRET = b"of the matrix, 32 bytes at least!"
FUTURE, PAST = 4_000_000_000, 1_000_000_000
GONE = "gone"
SOME = ("nothing", "both-all", "root")
"""Roles whose tokens have ended, or were never given: what they may do is no matter then."""
RECIPES = ("v3lockpb.", "v3electionpb.")
"""What they refuse has the code UNKNOWN, as etcd's."""
CELLS_MIN = 1_500

Shown = dict[str, Any]
"""Credentials of a caller: arguments of ``World.start``."""


def populated(**settings: Any) -> World:
    """A world with a user for each role, of the same name, and the leases of the cases."""
    world = World(tuple(LEASES), **settings)
    for name, role in ROLES.items():
        if role.is_root:
            world.user(name, role="root")
        else:
            grants = [("READ", *one) for one in role.reads] + [("WRITE", *one) for one in role.writes]
            # An interval of a role has one permission: both kinds of one interval are one of both.
            both = {grant[1:] for grant in grants if sum(grant[1:] == other[1:] for other in grants) == 2}
            world.user(name, *{("READWRITE" if one[1:] in both else one[0], *one[1:]) for one in grants})
    world.user(GONE, role="root")
    world.enable()
    restore(world)
    return world


def restore(world: World) -> None:
    """Undo the effects of an admitted request, so that only the leases' keys exist."""
    disarm = rpc_pb2.AlarmRequest(action=rpc_pb2.AlarmRequest.DEACTIVATE, alarm=rpc_pb2.NOSPACE)
    world.entry(Kind.ALARM, disarm.SerializeToString())
    everything = rpc_pb2.DeleteRangeRequest(key=b"\0", range_end=b"\0").SerializeToString()
    world.entry(Kind.DELETE_RANGE, everything)
    for lease, keys in LEASES.items():
        for key in keys:
            world.put(key, b"v", lease)


def delete_gone(world: World) -> None:
    world.change(user_delete=rpc_pb2.AuthUserDeleteRequest(name=GONE))


def simple_tokens(world: World) -> dict[str, tuple[Shown, tuple[int, str] | None]]:
    """By kind and role: the credentials, and the answer to all of that kind; None: as the oracle says."""
    shown: dict[str, tuple[Shown, tuple[int, str] | None]] = {"nobody": ({}, NOBODY)}
    shown["of a deleted user"] = ({"token": world.token(GONE)}, BAD_TOKEN)
    delete_gone(world)
    shown["certificate of a deleted user"] = ({"cn": GONE}, DENIED)
    for name in ROLES:
        shown[f"simple {name}"] = ({"token": world.token(name)}, None)
        shown[f"certificate {name}"] = ({"cn": name}, None)
    for name in SOME:
        shown[f"wrong {name}"] = ({"token": world.token(name)[::-1], "cn": name}, BAD_TOKEN)
        expired = world.token(name)
        session = world.users.tokens.find(expired.encode())
        assert session is not None
        session.used_at -= 301
        shown[f"expired {name}"] = ({"token": expired, "cn": name}, BAD_TOKEN)
    return shown


def signed_tokens(world: World) -> dict[str, tuple[Shown, tuple[int, str] | None]]:
    delete_gone(world)
    revision = world.auth.revision

    def token(user: str, revision: int, exp: int, key: bytes = SECRET) -> Shown:
        claims = {"username": user, "revision": revision, "exp": exp}
        return {"token": jwt.encode(claims, key, algorithm="HS256")}

    shown: dict[str, tuple[Shown, tuple[int, str] | None]] = {
        "signed, of a deleted user": (token(GONE, revision, FUTURE), DENIED)
    }
    for name in ROLES:
        shown[f"signed {name}"] = (token(name, revision, FUTURE), None)
    for name in SOME:
        shown[f"signed, old {name}"] = (token(name, revision - 1, FUTURE), OLD)
        shown[f"signed, expired {name}"] = (token(name, revision, PAST), BAD_TOKEN)
        shown[f"signed by another {name}"] = (token(name, revision, FUTURE, SECRET[::-1]), BAD_TOKEN)
    return shown


def old(role: Role, case: Case) -> tuple[int, str]:
    """What an entry comes to that was let in under an older revision: who is root is, by the users of now."""
    if not any(kind == "root" for kind, _ in case.needs):
        return OLD
    return LET_IN if role.is_root else DENIED


def role_of(shown: str) -> Role:
    return ROLES.get(shown.rpartition(" ")[2], Role())


async def verdict(world: World, case: Case, shown: Shown) -> tuple[int, str]:
    """The answer to a caller who makes a request: let in, or how it is refused."""
    world.node.is_held = bool(case.kind)
    call = world.start(case.method, case.request, **shown)
    for _ in range(100):
        if call.done or call.answers or (case.kind and world.node.drop()):
            break
        await asyncio.sleep(0)
    world.node.is_held = False
    found = _answered(case, call)
    await stop(call)
    if found == LET_IN and not case.kind and case.method.startswith(RECIPES):
        restore(world)
    return found


def _answered(case: Case, call: Call) -> tuple[int, str]:
    if case.method == "etcdserverpb.Watch/Watch":
        response = rpc_pb2.WatchResponse.FromString(call.answers[0])
        if not response.canceled:
            return LET_IN
        assert (response.created, response.watch_id) == (True, -1)
        text = response.cancel_reason.partition(" desc = ")[2]
        assert response.cancel_reason == f"rpc error: code = {errors.CODE_NAMES[REFUSALS[text][0]]} desc = {text}"
        return REFUSALS[text]
    # Others than those of rights: the request was let in, and failed for what it is.
    return call.status if call.status is not None and call.status[1] in REFUSALS else LET_IN


@pytest.fixture
def secret_file(tmp_path: Path) -> str:
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    return f"jwt,priv-key={path},sign-method=HS256"


async def matrix(settings: dict[str, Any], shown_of: Callable[[World], dict[str, Any]]) -> int:
    """Fill the cells of one kind of tokens; gives how many there are."""
    wrong: list[str] = []
    count = 0
    world = populated(**settings)
    shown_by_name = shown_of(world)
    for case in cases():
        for name, (shown, always) in shown_by_name.items():
            expected = always or (LET_IN if is_allowed(role_of(name), case.needs) else DENIED)
            if always == OLD:
                expected = old(role_of(name), case)
            if case.is_for_all and expected != BAD_TOKEN:
                expected = LET_IN
            if expected != LET_IN and case.method.startswith(RECIPES):
                expected = errors.UNKNOWN, expected[1]
            found = await verdict(world, case, shown)
            count += 1
            if found != (LET_IN if case.is_open else expected):
                wrong.append(f"{case.method} {case.what} / {name}: {found}, expected {expected}")
    assert not wrong, f"{len(wrong)} of {count}: " + "\n".join(wrong[:20])
    return count


@pytest.mark.long
async def test_at_the_member_that_is_asked_by_simple_tokens_and_certificates() -> None:
    count = await matrix({}, simple_tokens)
    print(f"{count} cells")
    assert count >= CELLS_MIN


async def test_at_the_member_that_is_asked_by_signed_tokens(secret_file: str) -> None:
    count = await matrix({"auth_token": secret_file}, signed_tokens)
    print(f"{count} cells")
    assert count >= CELLS_MIN


def applied(world: World, case: Case, caller: Caller | None) -> errors.StatusError | None:
    body = case.entry()
    if caller is None:
        outcome = world.node.apply(case.kind, body)
    else:
        outcome = world.node.apply(Kind.IDENTIFIED, wire.identified(caller, case.kind, body))
    error: errors.StatusError | None = outcome.error
    return error


def _refusal(error: errors.StatusError | None) -> tuple[int, str]:
    return (error.code, str(error)) if error is not None and str(error) in REFUSALS else LET_IN


async def test_entries_are_applied_under_the_state_at_apply_time() -> None:
    wrong: list[str] = []
    count = 0
    world = populated()
    delete_gone(world)
    for case in (one for one in cases() if one.kind):
        for name, role in ROLES.items():
            now = world.auth.revision
            for what, caller, expected in (
                ("now", Caller(name.encode(), now), LET_IN if is_allowed(role, case.needs) else DENIED),
                ("before", Caller(name.encode(), now - 1), old(role, case)),
            ):
                revision = world.machine.store.revision
                found = _refusal(applied(world, case, caller))
                count += 1
                if found != expected:
                    wrong.append(f"{case.method} {case.what} / {name}, let in {what}: {found}, expected {expected}")
                if found == LET_IN:
                    if not world.auth.is_enabled:
                        world.enable()
                    restore(world)
                elif world.machine.store.revision != revision:
                    wrong.append(f"{case.method} {case.what} / {name}: refused, and changed something")
        for caller, expected in ((None, NOBODY), (Caller(GONE.encode(), world.auth.revision), DENIED)):
            count += 1
            if _refusal(applied(world, case, caller)) != expected:
                wrong.append(f"{case.method} {case.what} / {caller}: not {expected}")
    print(f"{count} cells")
    assert not wrong, f"{len(wrong)} of {count}: " + "\n".join(wrong[:20])
    assert count >= CELLS_MIN


async def test_rights_that_are_taken_away_between_do_not_count() -> None:
    """Let in by the guard, then the role goes, then the entry is applied: nothing of it happens."""
    count = 0
    for name in ("both-part", "both-all", "writes-all"):
        world = populated()
        for case in (one for one in cases() if one.kind not in (0, Kind.ALARM) and is_allowed(ROLES[name], one.needs)):
            token = world.token(name)
            world.node.is_held = True
            call = world.start(case.method, case.request, token)
            await until(lambda call=call, world=world: call.done or world.node.holds)  # checks may take passes
            revision = world.machine.store.revision
            world.change(user_revoke_role=rpc_pb2.AuthUserRevokeRoleRequest(name=name, role=f"role-{name}"))
            world.node.let_go()
            world.node.is_held = False
            assert (call.status, world.machine.store.revision) == (OLD, revision), (case.method, case.what)
            world.change(user_grant_role=rpc_pb2.AuthUserGrantRoleRequest(user=name, role=f"role-{name}"))
            count += 1
    print(f"{count} cells")
    assert count >= 300


VALUES = {"etcdserverpb.PutRequest.value", "etcdserverpb.Compare.value", "etcdserverpb.Compare.lease"} | {
    f"v3electionpb.{name}Request.value" for name in ("Campaign", "Proclaim")
}
"""What is written or compared: it names no key."""


def _fields(descriptor: Any, seen: frozenset[str] = frozenset()) -> Iterator[str]:
    """The fields of a request by which it may name keys: bytes, leases, and whether the value before is read."""
    if descriptor.full_name in seen:
        return
    for field in descriptor.fields:
        if field.message_type is not None:
            yield from _fields(field.message_type, seen | {descriptor.full_name})
        elif field.type == field.TYPE_BYTES or field.name in ("lease", "prev_kv", "keys"):
            yield f"{descriptor.full_name}.{field.name}"


def _set(message: Any) -> Iterator[str]:
    for field, value in message.ListFields():
        yield f"{message.DESCRIPTOR.full_name}.{field.name}"
        if field.message_type is not None:
            for one in [value] if hasattr(value, "ListFields") else value:
                yield from _set(one)


def test_every_field_that_may_name_keys_is_in_some_cell() -> None:
    missing: list[str] = []
    by_method: dict[str, set[str]] = {}
    for case in cases():
        by_method.setdefault(case.method, set()).update(_set(case.request))
    for service, methods in SERVICES.items():
        for name, method in methods.items() if service != "raftkvpb.Peer" else ():
            named = by_method.get(f"{service}/{name}")
            if named is None:
                missing.append(f"{service}/{name}: no case")
            elif not service.startswith(("etcdserverpb.Auth", "raftkvpb.Admin")):  # all of which are root's
                wanted = {one for one in _fields(method.request.DESCRIPTOR) if one not in VALUES}
                missing += sorted(f"{service}/{name}: {field}" for field in wanted - named)
    assert missing == []
