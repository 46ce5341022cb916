"""Long calls that lose their credentials or rights: every long-running method, each kind of credential."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
import pytest

from raftkv.pb import election_pb2, lock_pb2, rpc_pb2
from raftkv.pb.services import SERVICES
from raftkv.server.auth.table import TABLE
from tests.rpc.loop import until
from tests.server.auth.test_guard import BAD_TOKEN, DENIED, NOBODY, answers, settled, watch
from tests.server.auth.world import Call, World, stop

SECRET = "s" * 64
WATCH, KEEP_ALIVE = "etcdserverpb.Watch/Watch", "etcdserverpb.Lease/LeaseKeepAlive"
LASTING = sorted(f"{service}/{method}" for service, rows in TABLE.items() for method, row in rows.items() if row.lasts)
REQUESTS: dict[str, Any] = {
    "etcdserverpb.KV/RangeStream": rpc_pb2.RangeRequest(key=b"a", range_end=b"b"),
    "v3lockpb.Lock/Lock": lock_pb2.LockRequest(name=b"a"),
    "v3electionpb.Election/Campaign": election_pb2.CampaignRequest(name=b"a", value=b"v"),
    "v3electionpb.Election/Leader": election_pb2.LeaderRequest(name=b"a"),
    "v3electionpb.Election/Observe": election_pb2.LeaderRequest(name=b"a"),
}
"""What alice may ask for. The other methods are of root alone."""

SIMPLE, SIGNED, CERTIFICATE, NONE = "simple token", "signed token", "certificate", "nothing"


class Alice:
    """A user, what she shows, and a world that asks for users unless it is about to."""

    def __init__(self, act: object, shown: str, folder: Path, clock: list[float], role: str = "") -> None:
        (folder / "secret").write_text(SECRET)
        signed = {"auth_token": f"jwt,priv-key={folder / 'secret'},sign-method=HS256"} if shown == SIGNED else {}
        self.world = world = World((200,), **signed)
        self.clock = clock
        self.role = role or "role-alice"
        if role:
            world.user("root", role="root")
            world.user("alice", role=role)
        else:
            world.user("alice", ("READWRITE", b"a", b"b"))
        if act is not _enable:
            world.enable()
        self._shown = shown
        self._token: str | None = None
        if shown == SIMPLE:
            self._token = world.token("alice")
        elif shown == SIGNED:
            claims = {"username": "alice", "revision": world.auth.revision, "exp": clock[0] + 60}
            self._token = jwt.encode(claims, SECRET, algorithm="HS256")

    def start(self, method: str, request: Any) -> Call:
        """Begin a call."""
        return self.world.start(method, request, self._token, cn="alice" if self._shown == CERTIFICATE else "")

    def happens(self, act: Event) -> None:
        """Have something happen, at the end of a turn's entries."""
        act(self)
        self.world.node.let_go()


Event = Callable[[Alice], None]


def _revoke_role(alice: Alice) -> None:
    request = rpc_pb2.AuthUserRevokeRoleRequest(name="alice", role=alice.role)
    alice.world.change(user_revoke_role=request)


def _narrow_role(alice: Alice) -> None:
    if alice.role == "root":
        _revoke_role(alice)  # the permissions of root cannot be changed
    else:
        request = rpc_pb2.AuthRoleRevokePermissionRequest(role=alice.role, key=b"a", range_end=b"b")
        alice.world.change(role_revoke_permission=request)


def _delete_user(alice: Alice) -> None:
    alice.world.change(user_delete=rpc_pb2.AuthUserDeleteRequest(name="alice"))


def _replace_user(alice: Alice) -> None:
    _delete_user(alice)
    alice.world.user("alice", role=alice.role)


def _change_password(alice: Alice) -> None:
    alice.world.change(user_change_password=rpc_pb2.AuthUserChangePasswordRequest(name="alice"))


def _change_another(alice: Alice) -> None:
    alice.world.user("bob", ("READ", b"b", b"c"))


def _expire(alice: Alice) -> None:
    alice.clock[0] += 3600.0
    alice.world.users.live.changed()


def _enable(alice: Alice) -> None:
    alice.world.enable()


# What happens, what the call has shown, and what it ends with; None: it goes on.
EVENTS: list[tuple[Event, dict[str, tuple[int, str] | None]]] = [
    (_revoke_role, {SIMPLE: DENIED, SIGNED: DENIED, CERTIFICATE: DENIED}),
    (_narrow_role, {SIMPLE: DENIED, SIGNED: DENIED, CERTIFICATE: DENIED}),
    (_delete_user, {SIMPLE: BAD_TOKEN, SIGNED: DENIED, CERTIFICATE: DENIED}),
    (_replace_user, {SIMPLE: BAD_TOKEN, SIGNED: DENIED, CERTIFICATE: DENIED}),
    # Neither says anything of the password.
    (_change_password, {SIMPLE: BAD_TOKEN, SIGNED: None, CERTIFICATE: None}),
    (_expire, {SIGNED: BAD_TOKEN}),
    (_change_another, {SIMPLE: None, SIGNED: None, CERTIFICATE: None}),
    (_enable, {NONE: NOBODY, CERTIFICATE: None}),
]
CASES = [
    pytest.param(act, shown, ends, id=f"{act.__name__.strip('_')}, {shown}")
    for act, by_shown in EVENTS
    for shown, ends in by_shown.items()
]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of the wall, by which signed tokens end."""
    now = [time.time()]
    monkeypatch.setattr(time, "time", lambda: now[0])
    return now


EVERY_EVENT = (WATCH, "v3lockpb.Lock/Lock", "etcdserverpb.Maintenance/Snapshot")
"""Calls that `make test` has end by every event: a stream, an answer, and one of root alone. All others: by these."""

AT_ALL_CALLS = ((_revoke_role, SIMPLE), (_expire, SIGNED), (_enable, NONE))


@pytest.mark.parametrize(
    ("method", "act", "shown", "ends"),
    [
        pytest.param(
            *(method, *case.values),
            id=f"{method}-{case.id}",
            marks=[] if method in EVERY_EVENT or case.values[:2] in AT_ALL_CALLS else pytest.mark.long,
        )
        for case in CASES
        for method in LASTING
    ],
)
async def test_a_call_that_lasts_ends_with_what_let_it_in(tmp_path, clock, method, act, shown, ends):
    alice = Alice(act, shown, tmp_path, clock, "" if method in REQUESTS else "root")
    _hold(alice.world, method)
    service, _, name = method.partition("/")
    call = alice.start(method, REQUESTS.get(method) or SERVICES[service][name].request())
    await until(lambda: len(alice.world.users.live) == 1)
    alice.happens(act)
    if ends is None:
        await asyncio.sleep(0)
        assert not call.done
        await stop(call)
    else:
        await until(lambda: call.done)
        assert call.status is not None
        assert call.status[1] == ends[1]


def _hold(world: World, method: str) -> None:
    """Serve a method by what never answers: the guard alone decides how long a call lasts."""

    async def wait(call: Any) -> None:
        await call.receive()
        await asyncio.Event().wait()

    service, _, name = method.partition("/")
    if SERVICES[service][name].server_streaming:
        world.registry.stream("/" + method, wait)
    else:
        world.registry.unary("/" + method, lambda call, data: None)


@pytest.mark.parametrize("method", [WATCH, KEEP_ALIVE])
@pytest.mark.parametrize(("act", "shown", "ends"), CASES)
async def test_a_stream_of_requests_is_served_by_what_its_client_has_now(tmp_path, clock, method, act, shown, ends):
    """A watch ends, or a keep-alive is refused; a signed token of before a change of users may ask for nothing new."""
    alice = Alice(act, shown, tmp_path, clock)
    alice.world.put(b"a1", lease=200)
    request: Any = watch(b"a1", b"") if method == WATCH else rpc_pb2.LeaseKeepAliveRequest(ID=200)
    call = alice.start(method, request)
    await settled(call, 1)
    alice.happens(act)
    if method == WATCH:
        alice.world.put(b"a1", b"behind the change")
        alice.world.node.let_go()
        await settled(call, 2)
        (after,) = answers(call)[1:]
        assert (after.canceled, len(after.events)) == ((False, 1) if ends is None else (True, 0))
    else:
        if not call.done:
            call.ask(request)
        await until(lambda: call.done or len(call.answers) == 2)
        is_old = shown == SIGNED and act is not _expire
        assert call.done == (ends is not None or is_old)
        assert len(call.answers) == (1 if call.done else 2)
    await stop(call)
