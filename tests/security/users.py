"""Attacks of users on each other: what a user who may touch ``foo`` alone gets of the rest."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc

from raftkv.pb import auth_pb2, rpc_pb2
from tests.compat.wire import Wire
from tests.relay import Relay
from tests.security.attack import FALLS, RESISTS, Attack, Stage

AUTH, KV, LEASE = "etcdserverpb.Auth", "etcdserverpb.KV", "etcdserverpb.Lease"
PASSWORDS = {"root": "root-of-all", "alice": "alice-in-chains", "writer": "writes-only"}
SECRET, MINE = b"secret/k", b"foo"
LEASE_ID = 7_777
DEADLINE_S = 3.0
Operation = rpc_pb2.RequestOp
READWRITE, READ, WRITE = auth_pb2.Permission.READWRITE, auth_pb2.Permission.READ, auth_pb2.Permission.WRITE


def make_users(wire: Wire) -> dict[str, str]:
    """Root, Alice, who may read and write ``foo``, and one who may only write it; a secret; users are asked for.

    Returns:
        a token of each.
    """

    def must(method: str, request: Any) -> Any:
        answer = wire.call(method, request)
        assert answer.code == "OK", (method, answer)
        return answer.message

    for name, password in PASSWORDS.items():
        must(f"{AUTH}/UserAdd", rpc_pb2.AuthUserAddRequest(name=name, password=password))
    for role, kind in (("root", None), ("alice", READWRITE), ("writer", WRITE)):
        must(f"{AUTH}/RoleAdd", rpc_pb2.AuthRoleAddRequest(name=role))
        if kind is not None:
            permission = auth_pb2.Permission(permType=kind, key=MINE)
            must(f"{AUTH}/RoleGrantPermission", rpc_pb2.AuthRoleGrantPermissionRequest(name=role, perm=permission))
        must(f"{AUTH}/UserGrantRole", rpc_pb2.AuthUserGrantRoleRequest(user=role, role=role))
    must(f"{LEASE}/LeaseGrant", rpc_pb2.LeaseGrantRequest(ID=LEASE_ID, TTL=3600))
    must(f"{KV}/Put", rpc_pb2.PutRequest(key=SECRET, value=b"the secret", lease=LEASE_ID))
    must(f"{KV}/Put", rpc_pb2.PutRequest(key=MINE, value=b"what was there"))
    must(f"{AUTH}/AuthEnable", rpc_pb2.AuthEnableRequest())
    return {name: _token(wire, name) for name in PASSWORDS}


def _token(wire: Wire, name: str, password: str | None = None) -> str:
    request = rpc_pb2.AuthenticateRequest(name=name, password=password or PASSWORDS[name])
    answer = wire.call(f"{AUTH}/Authenticate", request)
    return answer.message.token if answer.message is not None else ""


def control(stage: Stage) -> bool:
    """What is refused everywhere: a plain read, write and deletion of another's key. Shows that users are asked for."""
    plain = [
        (f"{KV}/Range", rpc_pb2.RangeRequest(key=SECRET)),
        (f"{KV}/Range", rpc_pb2.RangeRequest(key=MINE, range_end=b"\0")),
        (f"{KV}/Put", rpc_pb2.PutRequest(key=SECRET)),
        (f"{KV}/DeleteRange", rpc_pb2.DeleteRangeRequest(key=SECRET)),
        (f"{AUTH}/UserAdd", rpc_pb2.AuthUserAddRequest(name="mallory", password="mallory-mallory")),
        (f"{AUTH}/UserGrantRole", rpc_pb2.AuthUserGrantRoleRequest(user="alice", role="root")),
    ]
    assert stage.call(f"{KV}/Range", rpc_pb2.RangeRequest(key=MINE), "alice").code == "OK"
    return any(stage.call(method, request, "alice").code == "OK" for method, request in plain)


def keys_of_a_lease(stage: Stage) -> bool:
    """The names of keys that Alice may not read, by the lease that they hang on."""
    request = rpc_pb2.LeaseTimeToLiveRequest(ID=LEASE_ID, keys=True)
    answer = stage.call(f"{LEASE}/LeaseTimeToLive", request, "alice")
    return answer.message is not None and SECRET in answer.message.keys


def _open_to(stage: Stage, user: str) -> list[str]:
    requests = [
        ("etcdserverpb.Cluster/MemberList", rpc_pb2.MemberListRequest()),
        ("etcdserverpb.Maintenance/Alarm", rpc_pb2.AlarmRequest(action=rpc_pb2.AlarmRequest.GET)),
        (f"{LEASE}/LeaseGrant", rpc_pb2.LeaseGrantRequest(TTL=60)),
        (f"{KV}/Compact", rpc_pb2.CompactionRequest(revision=2)),
    ]
    return [method for method, request in requests if stage.call(method, request, user).code == "OK"]


def calls_without_user(stage: Stage) -> bool:
    """Members, alarms, leases and the history, for any client that reaches the port."""
    return bool(_open_to(stage, ""))


def alarm_without_user(stage: Stage) -> bool:
    """An alarm that stops all writes, raised by any client that reaches the port."""
    alarm = rpc_pb2.AlarmRequest(action=rpc_pb2.AlarmRequest.ACTIVATE, memberID=1, alarm=rpc_pb2.NOSPACE)
    raised = stage.call("etcdserverpb.Maintenance/Alarm", alarm).code == "OK"
    alarm.action = rpc_pb2.AlarmRequest.DEACTIVATE
    stage.call("etcdserverpb.Maintenance/Alarm", alarm, "root")
    return raised


def compaction_by_a_user(stage: Stage) -> bool:
    """History of all keys is taken away by a user who may touch one."""
    return stage.call(f"{KV}/Compact", rpc_pb2.CompactionRequest(revision=3), "alice").code == "OK"


def _shows(answer: Any, value: bytes) -> bool:
    return answer.message is not None and value in answer.message.SerializeToString()


def nested_read(stage: Stage) -> bool:
    """A read of another's key, inside of a txn inside of a txn."""
    inner = Operation(request_range=rpc_pb2.RangeRequest(key=SECRET))
    nested = Operation(request_txn=rpc_pb2.TxnRequest(success=[inner], failure=[inner]))
    return _shows(stage.call(f"{KV}/Txn", rpc_pb2.TxnRequest(success=[nested]), "alice"), b"the secret")


def nested_write(stage: Stage) -> bool:
    """A write of another's key, inside of a txn inside of a txn."""
    inner = Operation(request_put=rpc_pb2.PutRequest(key=b"secret/new", value=b"x"))
    nested = Operation(request_txn=rpc_pb2.TxnRequest(success=[inner]))
    return stage.call(f"{KV}/Txn", rpc_pb2.TxnRequest(success=[nested]), "alice").code == "OK"


def nested_compare(stage: Stage) -> bool:
    """What another's key holds, guessed by compares inside of a txn inside of a txn."""
    guess = rpc_pb2.Compare(key=SECRET, target=rpc_pb2.Compare.VALUE, result=rpc_pb2.Compare.EQUAL, value=b"the secret")
    nested = Operation(request_txn=rpc_pb2.TxnRequest(compare=[guess]))
    return stage.call(f"{KV}/Txn", rpc_pb2.TxnRequest(success=[nested]), "alice").code == "OK"


def lease_in_a_txn(stage: Stage) -> bool:
    """A put in a txn attaches a key to a lease with keys of others, so that its end can be brought about."""
    put = Operation(request_put=rpc_pb2.PutRequest(key=MINE, value=b"x", lease=LEASE_ID))
    done = stage.call(f"{KV}/Txn", rpc_pb2.TxnRequest(success=[put]), "alice").code == "OK"
    stage.call(f"{KV}/Put", rpc_pb2.PutRequest(key=MINE, value=b"what was there"), "root")
    return done


def lease_of_others(stage: Stage) -> bool:
    """A put and a revocation with a lease on which keys of others hang."""
    put = stage.call(f"{KV}/Put", rpc_pb2.PutRequest(key=MINE, lease=LEASE_ID), "alice").code == "OK"
    revoke = stage.call(f"{LEASE}/LeaseRevoke", rpc_pb2.LeaseRevokeRequest(ID=LEASE_ID), "alice").code == "OK"
    return put or revoke


def previous_in_a_txn(stage: Stage) -> bool:
    """Who may write a key, and not read it, is shown what was there."""
    request = rpc_pb2.PutRequest(key=MINE, value=b"what was there", prev_kv=True)
    nested = Operation(request_txn=rpc_pb2.TxnRequest(success=[Operation(request_put=request)]))
    for call in (
        (f"{KV}/Put", request),
        (f"{KV}/Txn", rpc_pb2.TxnRequest(success=[Operation(request_put=request)])),
        (f"{KV}/Txn", rpc_pb2.TxnRequest(success=[nested])),
    ):
        if _shows(stage.call(*call, "writer"), b"what was there"):
            return True
    return False


@contextlib.contextmanager
def watching(stage: Stage, request: rpc_pb2.WatchRequest, user: str) -> Iterator[queue.Queue[Any]]:
    """A watch stream: what comes on it, and ``None`` at its end."""
    requests: queue.Queue[bytes | None] = queue.Queue()
    requests.put(request.SerializeToString())
    call = stage.wire.channel().stream_stream("/etcdserverpb.Watch/Watch")(
        iter(requests.get, None), timeout=30, metadata=(("token", stage.tokens[user]),) if user else ()
    )
    found: queue.Queue[Any] = queue.Queue()

    def read() -> None:
        with contextlib.suppress(grpc.RpcError):
            for message in call:
                found.put(rpc_pb2.WatchResponse.FromString(message))
        found.put(None)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        requests.put(None)
        call.cancel()
        thread.join(90)


def _sees(stage: Stage, create: rpc_pb2.WatchCreateRequest, user: str) -> bool:
    """Whether a watch from the first revision on is let in, and shows the secret."""
    create.start_revision = 1
    create.progress_notify = True
    with watching(stage, rpc_pb2.WatchRequest(create_request=create), user) as found:
        while (response := found.get(timeout=30)) is not None:
            if response.canceled:
                return False
            if response.events:
                return any(event.kv.key == SECRET for event in response.events)
    return False


def grace_of_another(stage: Stage) -> bool:
    """Alice keeps two leases with a grace of 1 ms; root attaches a key to one, and Alice's connection breaks.

    Her own key ends soon, on a member that knows graces: then it has heard of the break.
    """
    hers, roots, key = LEASE_ID + 1, LEASE_ID + 2, b"secret/attached"
    requests: queue.Queue[bytes | None] = queue.Queue()
    for lease in (roots, hers):
        stage.call(f"{LEASE}/LeaseGrant", rpc_pb2.LeaseGrantRequest(ID=lease, TTL=3600), "alice")
        requests.put(rpc_pb2.LeaseKeepAliveRequest(ID=lease, disconnect_grace_ms=1).SerializeToString())
    own = rpc_pb2.PutRequest(key=MINE, value=b"what was there", lease=hers)
    relay = Relay(stage.endpoint)
    with grpc.insecure_channel(relay.endpoint) as channel:
        keep_alives = channel.stream_stream(f"/{LEASE}/LeaseKeepAlive")
        call = keep_alives(iter(requests.get, None), metadata=(("token", stage.tokens["alice"]),), timeout=30)
        next(call), next(call)
        assert stage.call(f"{KV}/Put", own, "alice").code == "OK"
        attached = rpc_pb2.PutRequest(key=key, value=b"root's", lease=roots)
        assert stage.call(f"{KV}/Put", attached, "root").code == "OK"
        relay.close()
        until = time.monotonic() + DEADLINE_S
        while stage.call(f"{KV}/Range", rpc_pb2.RangeRequest(key=MINE), "alice").message.kvs:
            if time.monotonic() > until:
                break  # etcd's members know none
        requests.put(None)
    is_gone = not stage.call(f"{KV}/Range", rpc_pb2.RangeRequest(key=key), "root").message.kvs
    assert stage.call(f"{KV}/Put", rpc_pb2.PutRequest(key=MINE, value=b"what was there"), "alice").code == "OK"
    for lease in (roots, hers):
        stage.call(f"{LEASE}/LeaseRevoke", rpc_pb2.LeaseRevokeRequest(ID=lease), "root")
    return is_gone


def watch_from_one_key(stage: Stage) -> bool:
    """A watch from a key on ("\\\\0" for its end) with the right to read that one key."""
    return _sees(stage, rpc_pb2.WatchCreateRequest(key=MINE, range_end=b"\0"), "alice")


def watch_without_user(stage: Stage) -> bool:
    """A watch of everything without a token."""
    return _sees(stage, rpc_pb2.WatchCreateRequest(key=b"\0", range_end=b"\0"), "")


def short_password(stage: Stage) -> bool:
    """A password of one character."""
    done = stage.call(f"{AUTH}/UserAdd", rpc_pb2.AuthUserAddRequest(name="short", password="x"), "root").code == "OK"
    stage.call(f"{AUTH}/UserDelete", rpc_pb2.AuthUserDeleteRequest(name="short"), "root")
    return done


def long_password(stage: Stage) -> bool:
    """bcrypt reads 72 bytes: the end of a longer password, which its owner believes in, would not be asked for."""
    start = "p" * 72
    stage.call(f"{AUTH}/UserAdd", rpc_pb2.AuthUserAddRequest(name="long", password=start + "-and-more"), "root")
    entered = bool(_token(stage.wire, "long", start + "-and-other"))
    stage.call(f"{AUTH}/UserDelete", rpc_pb2.AuthUserDeleteRequest(name="long"), "root")
    return entered


def forged_token(stage: Stage) -> bool:
    """Tokens that no member gave out: other letters, an unsigned JWT, a user's with one letter changed."""
    unsigned = "eyJhbGciOiJub25lIn0.eyJ1c2VybmFtZSI6InJvb3QiLCJyZXZpc2lvbiI6OX0."
    secret, _, index = stage.tokens["root"].partition(".")
    near = secret[:-1] + ("x" if secret[-1] != "x" else "y")
    try:
        for token in ("", "x" * 16 + ".5", unsigned, f"{near}.{index}", f"{secret.swapcase()}.{index}", "." * 100):
            stage.tokens["forged"] = token or " "
            if stage.call(f"{KV}/Range", rpc_pb2.RangeRequest(key=SECRET), "forged").code == "OK":
                return True
        return False
    finally:
        stage.tokens.pop("forged", None)


def token_of_the_future(stage: Stage) -> bool:
    """A token that says to be of an entry far ahead: a call that waits for that entry waits until its deadline.

    Whose clock ends it is a race: the client says that the time is over, etcd that the token is invalid.
    """
    token = stage.tokens["root"].partition(".")[0] + f".{10**9}"
    request = rpc_pb2.RangeRequest(key=MINE).SerializeToString()
    started = time.monotonic()
    pending = stage.wire.start(f"{KV}/Range", request, metadata=(("token", token),), timeout_s=DEADLINE_S)
    pending.answer()
    return time.monotonic() - started > 0.9 * DEADLINE_S


def lock_of_others(stage: Stage) -> bool:
    """The Lock service writes keys as the member: it must ask for the caller's rights."""
    from raftkv.pb import lock_pb2

    for user in ("", "alice"):
        if stage.call("v3lockpb.Lock/Lock", lock_pb2.LockRequest(name=b"secret/lock"), user).code == "OK":
            return True
    return False


ATTACKS = (
    Attack("control", "plain requests for another's key", control, RESISTS),
    Attack("CVE-2023-32082", "names of keys by LeaseTimeToLive", keys_of_a_lease, FALLS),
    Attack("CVE-2026-33413", "MemberList, Alarm, LeaseGrant, Compact without a user", calls_without_user, FALLS),
    Attack("CVE-2026-33413 (alarm)", "an alarm without a user", alarm_without_user, FALLS),
    Attack("CVE-2026-33413 (compaction)", "a compaction of a user with one key", compaction_by_a_user, FALLS),
    Attack("CVE-2026-33343", "a read in a nested txn", nested_read, FALLS),
    Attack("CVE-2026-33343 (write)", "a write in a nested txn", nested_write, FALLS),
    Attack("CVE-2026-33343 (compare)", "a compare in a nested txn", nested_compare, FALLS),
    Attack("CVE-2026-44283", "a put in a txn attaches to another's lease", lease_in_a_txn, FALLS),
    Attack("CVE-2026-44283 (prev_kv)", "previous values for who may only write", previous_in_a_txn, FALLS),
    Attack("control (lease)", "a put and a revocation with another's lease", lease_of_others, RESISTS),
    Attack("leases with a grace", "a broken connection ends a lease that got another's key", grace_of_another, RESISTS),
    # Came into etcd after 3.5.1.
    Attack("GHSA-xg4h-6gfc-h4m8", "a watch from one key on", watch_from_one_key, RESISTS),
    Attack("control (watch)", "a watch without a user", watch_without_user, RESISTS),
    Attack("CVE-2020-15115", "a password of one character", short_password, FALLS),
    Attack("Ada 2022 (bcrypt)", "two passwords that are alike for 72 bytes", long_password, FALLS),
    Attack("control (token)", "forged tokens", forged_token, RESISTS),
    Attack("etcd (token's index)", "a token of an entry far ahead", token_of_the_future, FALLS),
    Attack("control (lock)", "locks below another's prefix", lock_of_others, RESISTS),
)
