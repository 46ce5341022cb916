"""Users, roles and the auth revision: etcd's rules, the order of checks, and the stored records."""

from __future__ import annotations

from typing import Any

import pytest

from raftkv import errors
from raftkv.apply.applier import Outcome
from raftkv.apply.auth import directory
from raftkv.apply.auth.directory import HOLDERS_AT_ONCE
from raftkv.apply.wire import MEMBER, Caller, Kind, identified, versioned
from raftkv.pb import auth_pb2, raft_pb2
from raftkv.storage import schema
from tests.apply.auth.machine import HASH, HASHED, READ, READWRITE, WRITE, AuthMachine, permission

EVERYTHING = permission(READWRITE, b"\0", b"\0")


def machine_of(is_enabled: bool) -> AuthMachine:
    machine = AuthMachine()
    machine.add_role("r", permission(READ, b"a", b"c"))
    machine.add_role("root")
    machine.add_user("alice", "r")
    machine.add_user("root", "root")
    if is_enabled:
        assert machine.change(enable={}) is None
    return machine


@pytest.fixture
def machine() -> AuthMachine:
    return machine_of(True)


# Change, error while users are asked for (None: none), whether the revision grows; the same while they are not, if it
# differs.
RULES: list[tuple[dict[str, Any], type[Exception] | None, bool]] = [
    ({"enable": {}}, None, False),
    ({"disable": {}}, None, True),
    ({"user_add": {"name": "", "hashedPassword": HASHED}}, errors.UserEmptyError, False),
    ({"user_add": {"name": "alice", "hashedPassword": "no base64!"}}, errors.UserAlreadyExistError, False),
    ({"user_add": {"name": "bob", "hashedPassword": "no base64!"}}, errors.NoPasswordUserError, False),
    ({"user_add": {"name": "bob", "password": "secret"}}, errors.MalformedEntryError, False),
    ({"user_add": {"name": "bob", "password": HASH.decode()}}, None, True),
    ({"user_add": {"name": "bob", "hashedPassword": HASHED}}, None, True),
    ({"user_add": {"name": "bob", "options": {"no_password": True}, "password": "x"}}, None, True),
    ({"user_add": {"name": "x" * 512, "hashedPassword": HASHED}}, errors.AuthLimitError, False),
    ({"user_delete": {"name": "bob"}}, errors.UserNotFoundError, False),
    ({"user_delete": {"name": ""}}, errors.UserNotFoundError, False),
    ({"user_delete": {"name": "alice"}}, None, True),
    ({"user_delete": {"name": "root"}}, errors.InvalidAuthManagementError, False),
    ({"user_change_password": {"name": "bob", "hashedPassword": HASHED}}, errors.UserNotFoundError, False),
    ({"user_change_password": {"name": "alice", "hashedPassword": "???"}}, errors.NoPasswordUserError, False),
    ({"user_change_password": {"name": "alice", "password": "secret"}}, errors.MalformedEntryError, False),
    ({"user_change_password": {"name": "alice", "hashedPassword": HASHED}}, None, True),
    ({"user_grant_role": {"user": "bob", "role": "none"}}, errors.UserNotFoundError, False),
    ({"user_grant_role": {"user": "alice", "role": "none"}}, errors.RoleNotFoundError, False),
    ({"user_grant_role": {"user": "alice", "role": ""}}, errors.RoleNotFoundError, False),
    ({"user_grant_role": {"user": "alice", "role": "root"}}, None, True),
    ({"user_grant_role": {"user": "alice", "role": "r"}}, None, False),
    ({"user_revoke_role": {"name": "bob", "role": "r"}}, errors.UserNotFoundError, False),
    ({"user_revoke_role": {"name": "alice", "role": "none"}}, errors.RoleNotGrantedError, False),
    ({"user_revoke_role": {"name": "alice", "role": "r"}}, None, True),
    ({"user_revoke_role": {"name": "root", "role": "root"}}, errors.InvalidAuthManagementError, False),
    ({"user_revoke_role": {"name": "root", "role": "r"}}, errors.RoleNotGrantedError, False),
    ({"role_add": {"name": ""}}, errors.RoleEmptyError, False),
    ({"role_add": {"name": "r"}}, errors.RoleAlreadyExistError, False),
    ({"role_add": {"name": "s"}}, None, True),
    ({"role_add": {"name": "ä" * 256}}, errors.AuthLimitError, False),
    ({"role_delete": {"role": "none"}}, errors.RoleNotFoundError, False),
    ({"role_delete": {"role": "r"}}, None, True),
    ({"role_delete": {"role": "root"}}, errors.InvalidAuthManagementError, False),
    ({"role_grant_permission": {"name": "none"}}, errors.PermissionNotGivenError, False),
    (
        {"role_grant_permission": {"name": "none", "perm": permission(READ, b"b", b"b")}},
        errors.InvalidAuthManagementError,
        False,
    ),
    (
        {"role_grant_permission": {"name": "r", "perm": permission(READ, b"", b"b")}},
        errors.InvalidAuthManagementError,
        False,
    ),
    ({"role_grant_permission": {"name": "none", "perm": EVERYTHING}}, errors.RoleNotFoundError, False),
    ({"role_grant_permission": {"name": "r", "perm": EVERYTHING}}, None, True),
    ({"role_grant_permission": {"name": "r", "perm": permission(READ, b"a", b"c")}}, None, True),
    ({"role_grant_permission": {"name": "r", "perm": permission(7, b"a")}}, None, True),
    ({"role_revoke_permission": {"role": "none", "key": b"a"}}, errors.RoleNotFoundError, False),
    ({"role_revoke_permission": {"role": "r", "key": b"a"}}, errors.PermissionNotGrantedError, False),
    ({"role_revoke_permission": {"role": "r", "key": b"a", "range_end": b"c"}}, None, True),
    ({}, errors.MalformedEntryError, False),
]
ONLY_WHILE_ASKED = (errors.InvalidAuthManagementError,)


@pytest.mark.parametrize("number", range(len(RULES)))
@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_change_is_refused_or_carried_out_as_in_etcd(number: int, is_enabled: bool) -> None:
    change, expected, grows = RULES[number]
    machine = machine_of(is_enabled)
    is_about_root = "root" in str(change) and expected in ONLY_WHILE_ASKED
    if not is_enabled and is_about_root:
        expected, grows = None, True
    if not is_enabled and "disable" in change:
        grows = False
    before, records = machine.applier.auth.revision, auth_records(machine)
    assert machine.change(**change) is expected
    assert machine.applier.auth.revision == before + grows
    if expected is not None:
        assert auth_records(machine) == records
    assert_reads_back(machine)


def auth_records(machine: AuthMachine) -> list[list[tuple[bytes, bytes]]]:
    return [machine.store.meta_items(bucket) for bucket in (schema.AUTH, schema.AUTH_USERS, schema.AUTH_ROLES)]


def assert_reads_back(machine: AuthMachine) -> None:
    """What was written is what is in memory."""
    auth, again = machine.applier.auth, machine.reopened().applier.auth
    assert (again.is_enabled, again.revision) == (auth.is_enabled, auth.revision)
    assert {name: user.record() for name, user in again.users.items()} == {
        name: user.record() for name, user in auth.users.items()
    }
    for name, role in auth.roles.items():
        other = again.roles[name]
        assert (other.record(), other.permissions, other.holders) == (role.record(), role.permissions, role.holders)
    assert again.roles.keys() == auth.roles.keys()
    for name, user in auth.users.items():
        assert again.users[name].permission_count == user.permission_count
        for write in (False, True):
            other_set = again.directory.key_set(again.users[name], write=write)
            assert other_set.bounds == auth.directory.key_set(user, write=write).bounds
    assert again.directory._size_bytes == auth.directory._size_bytes


def test_enabling_auth_requires_root_with_root_role() -> None:
    machine = AuthMachine()
    assert machine.applier.auth.revision == 1
    assert machine.change(enable={}) is errors.RootUserNotExistError
    machine.add_user("root")
    assert machine.change(enable={}) is errors.RootRoleNotExistError
    assert machine.change(user_grant_role={"user": "root", "role": "root"}) is None
    assert machine.change(enable={}) is None
    assert machine.applier.auth.is_enabled
    assert machine.applier.auth.revision == 3


def test_a_deleted_role_is_taken_from_its_users(machine: AuthMachine) -> None:
    assert machine.change(role_delete={"role": "r"}) is None
    assert machine.applier.auth.users[b"alice"].roles == []
    assert machine.change(role_add={"name": "r"}) is None
    assert machine.applier.auth.users[b"alice"].permission_count == 0
    assert_reads_back(machine)


def test_a_role_of_many_is_taken_from_them_in_pieces(machine: AuthMachine) -> None:
    alice = machine.applier.auth.users[b"alice"]
    count = 3 * HOLDERS_AT_ONCE + 1
    for number in range(count - 1):
        name = f"user-{number}"
        machine.applier.auth.directory.add_user(auth_pb2.User(name=name.encode(), password=HASH))
        machine.applier.auth.directory.grant_role(machine.applier.auth.users[name.encode()], "r")
    revision = machine.applier.auth.revision
    body = versioned(Kind.AUTH, raft_pb2.AuthChange(role_delete={"role": "r"}).SerializeToString())
    work = machine.applier.begin(Kind.IDENTIFIED, identified(machine.caller("root"), Kind.AUTH, body))
    assert not isinstance(work, Outcome)
    left = []
    for _ in work:
        left.append(sum(user.roles == ["r"] for user in machine.applier.auth.users.values()))
        assert machine.applier.auth.revision == revision
    assert left == [count - HOLDERS_AT_ONCE * piece for piece in (1, 2, 3)]
    assert machine.applier.auth.revision == revision + 1
    assert alice.roles == []
    machine.store.set_applied(machine.store.applied_index + 1, 1)
    assert_reads_back(machine)


def test_an_interval_has_one_permission_in_a_role_and_the_last_one_counts(machine: AuthMachine) -> None:
    for kind, end in ((READ, b""), (READWRITE, b"b"), (WRITE, b"c"), (READ, b"b")):
        assert machine.change(role_grant_permission={"name": "r", "perm": permission(kind, b"a", end)}) is None
    role = machine.applier.auth.roles["r"]
    assert role.permissions == [(b"a", b"", READ), (b"a", b"b", READ), (b"a", b"c", WRITE)]
    assert b"ax" in role.readable
    assert b"b" not in role.readable
    assert_reads_back(machine)


def test_records_match_etcd_and_hold_creation_revision_of_users(machine: AuthMachine) -> None:
    _, users, roles = auth_records(machine)
    assert dict(auth_records(machine)[0]) == {b"authEnabled": b"\1", b"authRevision": (8).to_bytes(8)}
    assert auth_pb2.User.FromString(dict(users)[b"alice"]) == auth_pb2.User(
        name=b"alice", password=HASH, roles=["r"], options=auth_pb2.UserAddOptions(), raftkv_since=5
    )
    assert auth_pb2.Role.FromString(dict(roles)[b"r"]) == auth_pb2.Role(
        name=b"r", keyPermission=[permission(READ, b"a", b"c")]
    )


def test_a_record_of_etcd_may_hold_one_interval_twice(machine: AuthMachine) -> None:
    twice = auth_pb2.Role(name=b"r", keyPermission=[permission(READ, b"a"), permission(WRITE, b"a")])
    machine.store.meta_put(schema.AUTH_ROLES, b"r", twice.SerializeToString())
    machine.applier.auth.reload()
    role = machine.applier.auth.roles["r"]
    assert b"a" in role.readable
    assert b"a" in role.writable
    assert machine.change(role_grant_permission={"name": "r", "perm": permission(READ, b"a")}) is None
    assert role.permissions == [(b"a", b"", READ)]
    assert b"a" not in role.writable
    assert_reads_back(machine)


def test_listeners_hear_of_every_change(machine: AuthMachine) -> None:
    auth = machine.applier.auth
    told: list[object] = []
    auth.on_change.append(lambda: told.append((auth.is_enabled, auth.revision)))
    auth.on_password_change.append(told.append)
    auth.on_token_grant.append(lambda *grant: told.append(grant))
    at = auth.revision
    assert machine.grant_token("alice") is None
    assert machine.change(user_change_password={"name": "alice", "hashedPassword": HASHED}) is None
    assert machine.change(user_delete={"name": "alice"}) is None
    assert machine.change(disable={}) is None
    auth.reload()
    assert told == [
        (b"alice", b"s" * 32, 0),
        b"alice",
        (True, at + 1),
        b"alice",
        (True, at + 2),
        (False, at + 3),
        (False, at + 3),
    ]


def test_a_token_is_granted_only_by_a_member_at_the_present_revision(machine: AuthMachine) -> None:
    assert machine.change(user_add={"name": "cert", "options": {"no_password": True}}) is None
    assert machine.grant_token("alice") is None
    assert machine.grant_token("nobody") is errors.AuthFailedError
    assert machine.grant_token("cert") is errors.AuthFailedError
    assert machine.grant_token("alice", machine.applier.auth.revision - 1) is errors.AuthOldRevisionError
    assert machine.grant_token("alice", machine.applier.auth.revision + 1) is errors.AuthOldRevisionError
    assert machine.grant_token("alice", who=machine.caller("alice")) is errors.PermissionDeniedError
    assert machine.grant_token("root", who=machine.caller("root")) is errors.PermissionDeniedError
    assert machine.change(disable={}) is None
    assert machine.grant_token("alice", who=MEMBER) is errors.AuthNotEnabledError


def test_only_root_changes_users_after_auth_is_enabled(machine: AuthMachine) -> None:
    add = {"role_add": {"name": "s"}}
    assert machine.change(who="alice", **add) is errors.PermissionDeniedError
    assert machine.change(who="nobody", **add) is errors.PermissionDeniedError
    before = machine.applier.auth.revision - 1
    assert machine.change(who=Caller(b"alice", before), **add) is errors.PermissionDeniedError
    body = versioned(Kind.AUTH, raft_pb2.AuthChange(**add).SerializeToString())
    assert type(machine.entry(Kind.AUTH, body, None).error) is errors.UserEmptyError
    # Who changes users need not log in anew after each change, as in etcd.
    assert machine.change(who=Caller(b"root", before), **add) is None


@pytest.mark.parametrize(
    ("limit", "most", "change"),
    [
        ("USERS_MAX", 2, {"user_add": {"name": "bob", "hashedPassword": HASHED}}),
        ("ROLES_MAX", 2, {"role_add": {"name": "s"}}),
        ("ROLES_PER_USER_MAX", 1, {"user_grant_role": {"user": "alice", "role": "root"}}),
        ("GRANTS_MAX", 2, {"user_grant_role": {"user": "alice", "role": "root"}}),
        ("PERMISSIONS_PER_USER_MAX", 1, {"role_grant_permission": {"name": "r", "perm": permission(READ, b"x")}}),
        ("PERMISSIONS_PER_USER_MAX", 0, {"user_grant_role": {"user": "root", "role": "r"}}),
        ("BYTES_MAX", 150, {"role_grant_permission": {"name": "r", "perm": permission(READ, b"x" * 200)}}),
        ("BYTES_MAX", 150, {"user_add": {"name": "bob", "hashedPassword": HASHED}}),
        ("BYTES_MAX", 150, {"role_add": {"name": "s"}}),
        ("BYTES_MAX", 150, {"user_change_password": {"name": "alice", "hashedPassword": HASHED * 4}}),
    ],
)
def test_growing_tables_have_a_limit(monkeypatch, limit, most, change):
    machine = machine_of(False)
    records = auth_records(machine)
    monkeypatch.setattr(directory, limit, most)
    assert machine.change(**change) is errors.AuthLimitError
    assert auth_records(machine) == records
    assert_reads_back(machine)


def test_interval_cache_of_multi_role_users_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "JOINED_INTERVALS_MAX", 5)
    machine = AuthMachine()
    machine.add_role("one", *(permission(READWRITE, b"%d" % number) for number in range(3)))
    machine.add_role("two", permission(READWRITE, b"x"))
    for name in ("a", "b", "c"):
        machine.add_user(name, "one", "two")
    found = machine.applier.auth.directory
    for _ in range(2):
        for user in found.users.values():
            assert b"x" in found.key_set(user, write=True)
            assert found._joined_intervals == sum(map(len, found._joined.values())) <= 5
    assert machine.change(role_revoke_permission={"role": "two", "key": b"x"}) is None
    for user in found.users.values():
        assert b"x" not in found.key_set(user, write=True)
        assert b"2" in found.key_set(user, write=True)


def test_union_of_roles_follows_each_change() -> None:
    machine = AuthMachine()
    for name in ("one", "two"):
        machine.add_role(name, permission(READWRITE, name.encode()))
    machine.add_user("a", "one", "two")
    found, user = machine.applier.auth.directory, machine.applier.auth.users[b"a"]

    def granted() -> list[tuple[bool, ...]]:
        return [tuple(key in found.key_set(user, write=write) for write in (False, True)) for key in (b"one", b"two")]

    assert granted() == [(True, True), (True, True)]
    assert machine.change(role_grant_permission={"name": "two", "perm": permission(READ, b"two")}) is None
    assert granted() == [(True, True), (True, False)]
    assert machine.change(role_revoke_permission={"role": "one", "key": b"one"}) is None
    assert granted() == [(False, False), (True, False)]
    assert machine.change(role_delete={"role": "two"}) is None
    assert granted() == [(False, False), (False, False)]
