"""Rights needed by each kind of request, checked during apply; a refused request changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from raftkv import errors
from raftkv.apply.applier import Outcome
from raftkv.apply.auth import rights
from raftkv.apply.auth.rights import Left
from raftkv.apply.membership import conf_change_of
from raftkv.apply.wire import MEMBER, Caller, Kind, identified, versioned
from raftkv.pb import admin_pb2, raft_pb2, rpc_pb2
from raftkv.raft import confchange
from raftkv.storage import mvcc
from tests.apply.auth.machine import READ, READWRITE, WRITE, AuthMachine, permission
from tests.compat.store import delete, get, put, txn

LEASE = 7
FOREIGN_LEASE = 8


def cluster() -> AuthMachine:
    """A user for each right on the keys from a to below c; lease 8 has a key that only root may write."""
    machine = AuthMachine()
    for name, kinds in (("reader", (READ,)), ("writer", (WRITE,)), ("both", (READ, WRITE)), ("none", ())):
        machine.add_role(name, *(permission(kind, *at) for kind, at in zip(kinds, ((b"a", b"c"),) * 2, strict=False)))
        machine.add_user(name, name)
    # Two kinds for one interval are one permission: the last one counts.
    machine.add_role("more", permission(READWRITE, b"a", b"b"), permission(READWRITE, b"b", b"c"))
    assert machine.change(user_grant_role={"user": "both", "role": "more"}) is None
    for lease in (LEASE, FOREIGN_LEASE):
        machine.apply(rpc_pb2.LeaseGrantRequest(ID=lease, TTL=60))
    machine.apply(put(b"a", b"1", lease=LEASE))
    machine.apply(put(b"x", b"1", lease=FOREIGN_LEASE))
    machine.secure()
    return machine


@pytest.fixture
def machine() -> AuthMachine:
    return cluster()


def compare(key: bytes, range_end: bytes = b"") -> rpc_pb2.Compare:
    return rpc_pb2.Compare(key=key, range_end=range_end, target=rpc_pb2.Compare.VERSION)


def alarm(action: rpc_pb2.AlarmRequest.AlarmAction) -> rpc_pb2.AlarmRequest:
    return rpc_pb2.AlarmRequest(action=action, alarm=rpc_pb2.NOSPACE, memberID=1)


# Request, and who may: r(eader), w(riter), b(oth), n(one of the two but known); root and members may do all of it.
NEEDS: list[tuple[Any, str]] = [
    (put(b"a"), "wb"),
    (put(b"a", prev_kv=True), "b"),
    (put(b"a", b"", ignore_value=True), "wb"),
    (put(b"a", lease=LEASE), "wb"),
    (put(b"a", lease=FOREIGN_LEASE), ""),
    (put(b"c"), ""),
    (delete(b"a"), "wb"),
    (delete(b"a", b"c"), "wb"),
    (delete(b"a", b"c\0"), ""),
    (delete(b"a", b"\0"), ""),
    (delete(b"a", b"c", prev_kv=True), "b"),
    (rpc_pb2.LeaseGrantRequest(ID=9, TTL=60), "rwbn"),
    (rpc_pb2.LeaseRevokeRequest(ID=LEASE), "wb"),
    (rpc_pb2.LeaseRevokeRequest(ID=FOREIGN_LEASE), ""),
    (rpc_pb2.CompactionRequest(revision=2), ""),
    (alarm(rpc_pb2.AlarmRequest.GET), "rwbn"),
    (alarm(rpc_pb2.AlarmRequest.ACTIVATE), ""),
    (alarm(rpc_pb2.AlarmRequest.DEACTIVATE), ""),
    (txn(), "rwbn"),
    (txn([compare(b"a")]), "rb"),
    (txn([compare(b"a", b"c")]), "rb"),
    (txn([compare(b"a", b"\0")]), ""),
    (txn([compare(b"x")]), ""),
]
OPERATIONS: list[tuple[Any, str]] = [
    (get(b"a"), "rb"), (get(b"a", b"c"), "rb"), (get(b"a", b"\0"), ""), (get(b"x"), ""), (put(b"a"), "wb"),
    (put(b"a", prev_kv=True), "b"), (put(b"a", lease=FOREIGN_LEASE), ""), (put(b"x"), ""), (delete(b"b"), "wb"),
    (delete(b"b", prev_kv=True), "b"), (delete(b"b", b"\0"), ""),
]  # fmt: skip
for operation, allowed in OPERATIONS:
    NEEDS.append((txn(then=[get(b"a"), operation]), "".join(set(allowed) & set("rb"))))
    NEEDS.append((txn(then=[operation]), allowed))
    NEEDS.append((txn(otherwise=[operation]), allowed))
    NEEDS.append((txn(then=[txn(then=[operation])]), allowed))
    NEEDS.append(
        (
            txn(otherwise=[txn(then=[put(b"b")], otherwise=[txn([], then=[operation])])]),
            "".join(set(allowed) & set("wb")),
        )
    )
    NEEDS.append((txn(then=[txn([compare(b"x")], then=[operation])]), ""))
USERS = {"r": "reader", "w": "writer", "b": "both", "n": "none"}


@pytest.mark.parametrize("number", range(len(NEEDS)))
def test_a_request_without_its_right_is_refused_and_changes_nothing(number: int) -> None:
    request, allowed = NEEDS[number]
    for letter, user in [*USERS.items(), ("", "nobody")]:
        machine = cluster()
        before = machine.hash()
        outcome = machine.outcome(request, user)
        if letter and letter in allowed:
            assert outcome.error is None, (request, user)
        else:
            assert type(outcome.error) is errors.PermissionDeniedError, (request, user)
            assert machine.hash() == before
            assert machine.applier.leases.granted.keys() == {LEASE, FOREIGN_LEASE}
    for caller in ("root", MEMBER):
        assert cluster().outcome(request, caller).error is None
    assert type(cluster().outcome(request, None).error) is errors.UserEmptyError


def test_kinds_that_only_root_may_cause() -> None:
    quota = admin_pb2.QuotaSetRequest(prefix=b"a", keys_max=9)
    down = rpc_pb2.DowngradeInfo(enabled=True, targetVersion="3.5.0")
    for kind, request in ((Kind.HISTORY_QUOTA, quota), (Kind.DOWNGRADE, down)):
        for who, refused in (("both", True), ("root", False), (MEMBER, False), (None, True)):
            machine = cluster()
            caller = machine.caller(who) if isinstance(who, str) else who
            outcome = machine.entry(kind, versioned(kind, request.SerializeToString()), caller)
            assert (outcome.error is not None) == refused


def test_entries_of_members_cannot_be_caused_by_users() -> None:
    for kind, body in (
        (Kind.LEASE_EXPIRE, raft_pb2.LeaseDecision(ids=[FOREIGN_LEASE])),
        (Kind.LEASE_RENEW, raft_pb2.LeaseDecision(ids=[FOREIGN_LEASE])),
        (Kind.MEMBER_ATTRIBUTES, raft_pb2.MemberRecord()),
    ):
        machine = cluster()
        data = body.SerializeToString()
        for who in ("both", "root"):
            assert type(machine.entry(kind, data, machine.caller(who)).error) is errors.PermissionDeniedError
        assert machine.entry(kind, data, None).error is None
        assert machine.entry(kind, data, MEMBER).error is None


def test_every_kind_has_a_rule_or_is_for_root(machine: AuthMachine) -> None:
    of_members = rights.KINDS_OF_MEMBERS
    for kind in Kind:
        if kind in machine.applier.rights._rules or kind == Kind.IDENTIFIED:
            continue
        request = raft_pb2.AuthChange() if kind == Kind.AUTH else None
        with pytest.raises(errors.PermissionDeniedError):
            machine.applier.rights.check(kind, request, machine.caller("both"))
        if kind not in of_members:
            machine.applier.rights.check(kind, request, machine.caller("root"))


def test_an_entry_checked_under_an_older_auth_revision_is_refused(machine: AuthMachine) -> None:
    caller = machine.caller("both")
    assert machine.outcome(put(b"a"), caller).error is None
    assert machine.change(role_add={"name": "unrelated"}) is None
    assert type(machine.outcome(put(b"a"), caller).error) is errors.AuthOldRevisionError
    assert machine.outcome(put(b"a"), "both").error is None


def test_entry_of_deleted_administrator_is_refused_to_namesake(machine: AuthMachine) -> None:
    machine.add_user("carol", "root")
    caller = machine.caller("carol")
    assert machine.change(role_add={"name": "unrelated"}) is None
    compaction = rpc_pb2.CompactionRequest(revision=2)
    for _ in range(2):
        assert machine.change(user_delete={"name": "carol"}) is None
        assert type(machine.outcome(compaction, caller).error) is errors.PermissionDeniedError
        machine.add_user("carol", "root")
        assert type(machine.outcome(compaction, caller).error) is errors.AuthOldRevisionError
        assert machine.change(who=caller, user_add={"name": "backdoor"}) is errors.AuthOldRevisionError
        with pytest.raises(errors.AuthOldRevisionError):
            machine.applier.membership.check_caller(caller)
        machine.applier.auth.reload()
    assert machine.outcome(compaction, "carol").error is None


def shared() -> AuthMachine:
    """Alice may write a and b, bob b and c, carol is an administrator; lease 9 is alice's."""
    machine = AuthMachine()
    machine.apply(rpc_pb2.LeaseGrantRequest(ID=LEASE, TTL=60))
    for name, first, end in (("alice", b"a", b"c"), ("bob", b"b", b"d")):
        machine.add_role(name, permission(READWRITE, first, end))
        machine.add_user(name, name)
    machine.add_user("carol", "root")
    machine.secure()
    assert machine.outcome(rpc_pb2.LeaseGrantRequest(ID=9, TTL=60), "alice").error is None
    machine.applier.leases.reload()
    return machine


def in_txn(request: rpc_pb2.PutRequest) -> rpc_pb2.TxnRequest:
    return txn(then=[put(b"b")], otherwise=[txn(then=[request])])


@pytest.mark.parametrize("make", [lambda request: request, in_txn])
def test_key_is_not_attached_to_lease_of_owner_without_write_right(make: Callable[[rpc_pb2.PutRequest], Any]) -> None:
    machine = shared()
    assert type(machine.outcome(make(put(b"c", lease=9)), "bob").error) is errors.PermissionDeniedError
    for who, key in (("bob", b"b"), ("alice", b"b"), ("alice", b"a"), ("root", b"x")):
        assert machine.outcome(make(put(key, lease=9)), who).error is None, (who, key)
    # What no user, an administrator, or a user who is gone was granted is no user's own.
    assert machine.outcome(make(put(b"c", lease=LEASE)), "bob").error is None
    assert machine.outcome(rpc_pb2.LeaseGrantRequest(ID=10, TTL=60), "carol").error is None
    assert machine.outcome(make(put(b"c", lease=10)), "bob").error is None
    assert machine.outcome(rpc_pb2.LeaseGrantRequest(ID=11, TTL=60), "alice").error is None
    assert machine.change(user_delete={"name": "alice"}) is None
    assert machine.outcome(make(put(b"c", lease=11)), "bob").error is None


def test_a_lease_without_keys_is_revoked_by_its_owner_alone() -> None:
    machine = shared()
    revoke = rpc_pb2.LeaseRevokeRequest(ID=9)
    assert type(machine.outcome(revoke, "bob").error) is errors.PermissionDeniedError
    assert machine.outcome(put(b"b", lease=9), "alice").error is None
    assert machine.outcome(revoke, "bob").error is None  # as in etcd: all its keys are bob's too
    for owner, other in (("alice", "root"), ("carol", "carol"), ("alice", "alice")):
        assert machine.outcome(rpc_pb2.LeaseGrantRequest(ID=9, TTL=60), owner).error is None
        assert type(machine.outcome(revoke, "bob").error) is errors.PermissionDeniedError
        assert machine.outcome(revoke, other).error is None
    assert machine.outcome(rpc_pb2.LeaseRevokeRequest(ID=LEASE), "bob").error is None
    assert not machine.applier.leases.owners


def test_the_owner_of_a_lease_has_no_more_rights_than_others() -> None:
    machine = shared()
    assert machine.outcome(put(b"a", lease=9), "alice").error is None
    assert machine.change(role_revoke_permission={"role": "alice", "key": b"a", "range_end": b"c"}) is None
    for request in (put(b"b", lease=9), rpc_pb2.LeaseRevokeRequest(ID=9)):
        assert type(machine.outcome(request, "alice").error) is errors.PermissionDeniedError
    with pytest.raises(errors.PermissionDeniedError):
        machine.applier.rights.check_lease(machine.caller("alice"), 9, write=True)


def test_entries_without_a_user_are_refused_while_auth_is_enabled(machine: AuthMachine) -> None:
    caller = machine.caller("none")
    assert type(machine.outcome(put(b"a"), None).error) is errors.UserEmptyError
    assert type(machine.outcome(put(b"a"), caller).error) is errors.PermissionDeniedError
    assert machine.change(disable={}) is None
    assert machine.outcome(put(b"a"), None).error is None
    assert machine.outcome(put(b"a"), caller).error is None


def test_rights_come_before_alarms(machine: AuthMachine) -> None:
    assert machine.outcome(alarm(rpc_pb2.AlarmRequest.ACTIVATE), "root").error is None
    assert type(machine.outcome(put(b"a"), "reader").error) is errors.PermissionDeniedError
    assert type(machine.outcome(put(b"a"), "writer").error) is errors.NoSpaceError


def test_a_spoiled_identity_is_refused_and_an_unknown_kind_stops_the_member(machine: AuthMachine) -> None:
    good = identified(machine.caller("both"), Kind.PUT, put(b"a").SerializeToString())
    for size in range(2 + 11 + len(b"both")):
        assert type(machine.applier.apply(Kind.IDENTIFIED, good[:size]).error) is errors.MalformedEntryError
    nested = identified(machine.caller("root"), Kind.IDENTIFIED, good)
    assert type(machine.applier.apply(Kind.IDENTIFIED, nested).error) is errors.MalformedEntryError
    later = identified(machine.caller("root"), 200, bytes((9, 3)) + b"x")
    with pytest.raises(errors.UnknownEntryError, match=r"kind 200.*run raftkv 9\.3 or later"):
        machine.applier.apply(Kind.IDENTIFIED, later)


@pytest.mark.parametrize("size", [1, 63, 64, 300])
def test_all_keys_of_a_lease_are_looked_at(size: int) -> None:
    machine = AuthMachine()
    machine.add_role("r", *(permission(WRITE, b"%d" % digit, b"%d" % (digit + 1)) for digit in (1, 3, 5)))
    machine.add_user("alice", "r")
    machine.apply(rpc_pb2.LeaseGrantRequest(ID=LEASE, TTL=60))
    for number in range(size):
        machine.apply(put(b"%d%d" % ((1, 3, 5)[number % 3], number), lease=LEASE))
    machine.secure()
    revoke = rpc_pb2.LeaseRevokeRequest(ID=LEASE)
    check = machine.applier.rights.check
    for outside in (b"0", b"2", b"4", b"6", b"3x"):
        check(Kind.LEASE_REVOKE, revoke, machine.caller("alice"))
        assert machine.outcome(put(outside, lease=LEASE), "root").error is None
        if outside == b"3x":
            check(Kind.LEASE_REVOKE, revoke, machine.caller("alice"))
        else:
            with pytest.raises(errors.PermissionDeniedError):
                check(Kind.LEASE_REVOKE, revoke, machine.caller("alice"))
            assert type(machine.outcome(put(b"1", lease=LEASE), "alice").error) is errors.PermissionDeniedError
        assert machine.outcome(put(outside), "root").error is None  # attached no more
    assert machine.outcome(revoke, "alice").error is None


@pytest.mark.parametrize("is_one_foreign", [False, True])
def test_a_lease_of_scattered_keys_is_looked_at_in_pieces(monkeypatch, is_one_foreign):
    monkeypatch.setattr(rights, "LOOKS_AT_ONCE", 4)
    monkeypatch.setattr(rights, "_LOOKS_PER_PIECE", 2)
    machine = AuthMachine()
    machine.add_role("r", *(permission(WRITE, b"%02d" % number) for number in range(0, 40, 2)))
    machine.add_user("alice", "r")
    machine.apply(rpc_pb2.LeaseGrantRequest(ID=LEASE, TTL=60))
    for number in range(0, 40, 2):
        machine.apply(put(b"%02d" % number, lease=LEASE))
    if is_one_foreign:
        machine.apply(put(b"39", lease=LEASE))
    machine.secure()
    caller = machine.caller("alice")
    revoke = rpc_pb2.LeaseRevokeRequest(ID=LEASE)
    # The member that proposes leaves it to applying, which pauses, and decides.
    machine.applier.rights.check(Kind.LEASE_REVOKE, revoke, caller)
    work = machine.applier.begin(Kind.IDENTIFIED, identified(caller, Kind.LEASE_REVOKE, revoke.SerializeToString()))
    assert not isinstance(work, Outcome)
    pauses = 0
    while True:
        try:
            next(work)
            pauses += 1
        except StopIteration as end:
            outcome = end.value
            break
    assert pauses > 5
    assert (type(outcome.error) is errors.PermissionDeniedError) == is_one_foreign
    assert (LEASE in machine.applier.leases.granted) == is_one_foreign
    assert machine.store.range(b"0", b"\0").count == (21 if is_one_foreign else 0)


def test_reads_and_writes_outside_the_log(machine: AuthMachine) -> None:
    check = machine.applier.rights
    for who, may_read, may_write in (
        ("reader", True, False),
        ("writer", False, True),
        ("both", True, True),
        ("none", False, False),
        ("root", True, True),
        (MEMBER, True, True),
    ):
        caller = machine.caller(who) if isinstance(who, str) else who
        check.check_user(caller)
        for may, ask in (
            (may_read, lambda caller=caller: check.check_read(caller, b"a", b"c")),
            (may_write, lambda caller=caller: check.check_write(caller, b"a", b"c")),
            (may_read, lambda caller=caller: check.check_lease(caller, LEASE, write=False)),
            (may_write, lambda caller=caller: check.check_lease(caller, LEASE, write=True)),
            (who in ("root", MEMBER), lambda caller=caller: check.check_lease(caller, FOREIGN_LEASE, write=False)),
            (who in ("root", MEMBER), lambda caller=caller: check.check_read(caller, b"a", b"\0")),
            (who in ("root", MEMBER), lambda caller=caller: check.check_root(caller)),
        ):
            if may:
                ask()
            else:
                with pytest.raises(errors.PermissionDeniedError):
                    ask()
    for ask_user in (check.check_user, check.check_root):
        with pytest.raises(errors.UserEmptyError):
            ask_user(None)
        with pytest.raises(errors.PermissionDeniedError):
            ask_user(machine.caller("nobody"))
    with pytest.raises(errors.AuthOldRevisionError):
        check.check_user(Caller(b"root", machine.applier.auth.revision - 1))
    check.check_root(Caller(b"root", machine.applier.auth.revision - 1))


def scattered(parts: int) -> AuthMachine:
    """Alice may write every other key, each by a permission of its own, and one lease has them all."""
    machine = AuthMachine()
    keys = [b"%04d" % number for number in range(0, 2 * parts, 2)]
    machine.add_role("r", *(permission(WRITE, key) for key in keys))
    machine.add_user("alice", "r")
    machine.apply(rpc_pb2.LeaseGrantRequest(ID=LEASE, TTL=60))
    for key in keys:
        machine.apply(put(key, lease=LEASE))
    machine.secure()
    return machine


def looked(left: Left) -> int:
    """Finish the work; return its number of pieces."""
    assert left is not None
    return len(list(left))


def test_a_lease_of_many_parts_is_looked_at_in_pieces() -> None:
    # 10,000 took 40 ms for each lease, and a client may ask for a thousand leases in one turn of the loop.
    machine = scattered(500)
    check, alice = machine.applier.rights, machine.caller("alice")
    first, second = (check.check_lease(alice, LEASE, write=True) for _ in range(2))
    assert looked(first) == 500 // 64
    assert second is not None
    assert next(second, None) is None, "what the first has found holds for both"
    assert check.check_lease(alice, LEASE, write=True) is None
    assert machine.outcome(put(b"0999", lease=LEASE), "root").error is None
    last = check.check_lease(alice, LEASE, write=True)
    with pytest.raises(errors.PermissionDeniedError):
        looked(last)
    with pytest.raises(errors.PermissionDeniedError):
        check.check_lease(alice, LEASE, write=True)


def test_rights_to_a_lease_are_not_cached_for_another_state() -> None:
    machine = scattered(500)
    check, alice = machine.applier.rights, machine.caller("alice")
    left = check.check_lease(alice, LEASE, write=True)
    assert left is not None
    next(left)
    assert machine.outcome(put(b"0001", lease=LEASE), "root").error is None  # behind what was looked at
    looked(left)
    with pytest.raises(errors.PermissionDeniedError):
        check.check_lease(alice, LEASE, write=True)
    assert machine.outcome(delete(b"0001"), "root").error is None
    left = check.check_lease(alice, LEASE, write=True)
    machine.add_role("s", permission(WRITE, b"z"))
    with pytest.raises(errors.AuthOldRevisionError):
        looked(left)


def test_rights_to_a_lease_are_cached_until_keys_or_users_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may ask a thousand times in one turn of the loop, and a look at many permissions takes 40 ms."""
    machine = AuthMachine()
    machine.add_role("r", *(permission(WRITE, b"%02d" % number) for number in range(0, 40, 2)))
    machine.add_user("alice", "r")
    machine.apply(rpc_pb2.LeaseGrantRequest(ID=LEASE, TTL=60))
    for number in range(0, 40, 2):
        machine.apply(put(b"%02d" % number, lease=LEASE))
    machine.secure()
    looks: list[bytes] = []
    first = machine.store.attachments.key_from

    def counted(lease: int, key: bytes) -> bytes | None:
        looks.append(key)
        return first(lease, key)

    stand_in = SimpleNamespace(attachments=SimpleNamespace(key_from=counted), revision=1)
    monkeypatch.setattr(machine.applier.rights, "_store", stand_in)
    check, store = machine.applier.rights, machine.applier.rights._store

    def ask(*, write: bool = True) -> tuple[bool, int]:
        looks.clear()
        try:
            for _ in check.check_lease(machine.caller("alice"), LEASE, write=write) or ():
                pass
        except errors.PermissionDeniedError:
            return False, len(looks)
        return True, len(looks)

    assert [ask(), ask(), ask(write=False), ask(write=False)] == [(True, 21), (True, 0), (False, 1), (False, 0)]
    assert machine.outcome(put(b"39", lease=LEASE), "root").error is None
    assert ask() == (True, 0), "of the same revision"
    store.revision = 2
    assert [ask(), ask()] == [(False, 21), (False, 0)]
    machine.add_role("s", permission(WRITE, b"39"))
    assert ask() == (False, 21), "a user or role has changed"
    monkeypatch.setattr(rights, "FOUND_MAX", 0)
    store.revision = 3
    assert [ask(), ask()] == [(False, 21), (False, 21)]


def test_the_first_key_of_a_lease_from_a_key_on_is_that_of_its_sorted_keys() -> None:
    rng = Random(5)
    table = mvcc.Attachments()
    model: dict[bytes, int] = {}
    for _ in range(3_000):
        key, lease = b"%d" % rng.randrange(300), rng.choice((1, 1, 1, 2))
        if key in model and rng.random() < 0.4:
            table.detach(key)
            del model[key]
        else:
            table.attach(key, lease)
            model[key] = lease
        start = b"%d" % rng.randrange(400)
        for each in (1, 2):
            expected = sorted(key for key in model if model[key] == each)
            assert table.key_from(each, start) == next((key for key in expected if key >= start), None)
            assert table.count(each) == len(expected)
    again = mvcc.Attachments()
    again.restore(model)
    for each in (1, 2):
        assert sorted(again.keys_unordered(each)) == sorted(table.keys_unordered(each))


def test_only_root_and_members_change_the_members(machine: AuthMachine) -> None:
    now = machine.applier.auth.revision
    machine.membership.bootstrap([rpc_pb2.Member(ID=1, name="m", peerURLs=["http://m1:1"])])
    added = rpc_pb2.Member(ID=2, peerURLs=["http://m2:1"])
    parts = [raft_pb2.MemberChange(kind=raft_pb2.MemberChange.ADD, member=added)]
    for caller, expected in (
        (None, errors.UserEmptyError),
        (raft_pb2.Caller(user=b"both", auth_revision=now), errors.PermissionDeniedError),
        (raft_pb2.Caller(user=b"both", auth_revision=now - 1), errors.PermissionDeniedError),
        (raft_pb2.Caller(user=b"root", auth_revision=now - 1), None),
        (raft_pb2.Caller(user=b"root", auth_revision=now), None),
        (raft_pb2.Caller(), None),
    ):
        record = raft_pb2.MembershipChange(request_id=5, changes=parts, caller=caller)
        decision = machine.membership.decide(confchange.encode(conf_change_of(record)))
        assert decision.request_id == 5
        assert (None if decision.error is None else type(decision.error)) is expected
    assert machine.change(disable={}) is None
    record = raft_pb2.MembershipChange(changes=parts)
    assert machine.membership.decide(confchange.encode(conf_change_of(record))).error is None
