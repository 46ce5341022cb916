"""Users and roles: entries that name who caused them, sets of keys, and records of users and roles.

The entries have an oracle of their own: for all bytes after the name of a user who may touch ``foo`` alone, nothing
else changes.
"""

from __future__ import annotations

from random import Random

from google.protobuf.message import DecodeError

from raftkv import errors
from raftkv.apply.auth.permissions import KeySet, is_interval
from raftkv.apply.auth.records import Role, User
from raftkv.apply.wire import VERSIONED_FIRST, Caller, Kind, decode_identified, identified, versioned
from raftkv.pb import auth_pb2, raft_pb2, rpc_pb2
from tests.apply.arbitrary import payload
from tests.apply.auth.machine import READ, READWRITE, AuthMachine, permission
from tests.apply.test_total import TYPES
from tests.fuzz.target import Target

KEEP = 300
MINE, SECRET = b"b", b"secret/k"
LETTERS = (b"a", b"b", b"c", b"k")


def _machine() -> AuthMachine:
    machine = AuthMachine()
    machine.applier.term = 1
    machine.membership.bootstrap([rpc_pb2.Member(ID=1, peerURLs=["http://127.0.0.1:1"])])
    machine.add_role("mine", permission(READWRITE, MINE))
    machine.add_user("alice", "mine")
    machine.answer(rpc_pb2.LeaseGrantRequest(ID=7, TTL=60))
    for key in (b"a", MINE, b"c", SECRET):
        machine.answer(rpc_pb2.PutRequest(key=key, value=b"as it was", lease=0 if key == MINE else 7))
    machine.secure()
    return machine


class _Identified:
    """Input: the body of an IDENTIFIED entry."""

    def __init__(self) -> None:
        self._inputs = KEEP

    def __call__(self, data: bytes) -> str:
        if self._inputs >= KEEP:
            self._machine, self._inputs = _machine(), 0
        machine, before = self._machine, self._state()
        self._inputs += 1
        try:
            caller, kind, _ = decode_identified(data)
        except errors.MalformedEntryError:
            caller, kind = None, -1
        try:
            outcome = machine.applier.apply(Kind.IDENTIFIED, data)
        except errors.UnknownEntryError:
            return f"unknown {kind}"
        machine.store.set_applied(machine.store.applied_index + 1, 1)
        # An empty name is a member's own: it is only made by members.
        if caller is None or caller.user not in (b"", b"root"):
            assert self._state() == before, (caller, kind)
        elif outcome.error is None:
            self._inputs = KEEP
        return f"{kind} {type(outcome.error).__name__}"

    def _state(self) -> tuple[object, ...]:
        machine = self._machine
        others = [kv for key in (b"a", b"c", SECRET) for kv in machine.store.range(key).kvs]
        everything = machine.store.range(b"\0", b"\0").count
        auth = machine.applier.auth
        return others, everything, auth.revision, auth.is_enabled, len(machine.membership.members), machine.alarms.any


def _entries() -> list[bytes]:
    rng = Random(5)
    made = []
    for user in (b"alice", b"root", b"mallory", b""):
        for kind, message in TYPES.items():
            body = payload(rng, message, 2)[:500]
            body = versioned(kind, body) if kind >= VERSIONED_FIRST else body
            made.append(identified(Caller(user, 99), kind, body))
    puts = [rpc_pb2.PutRequest(key=key, lease=7).SerializeToString() for key in (MINE, SECRET)]
    made += [identified(Caller(b"alice", 99), Kind.PUT, put) for put in puts]
    change = raft_pb2.AuthChange(user_grant_role={"user": "alice", "role": "root"}).SerializeToString()
    made.append(identified(Caller(b"alice", 99), Kind.AUTH, versioned(Kind.AUTH, change)))
    return made


def _key(byte: int) -> bytes:
    return (b"", b"\0", b"a", b"a\0", b"b", b"bb", b"c", b"\xff")[byte % 8]


UNIVERSE = (
    b"\0", b"\0\0", b"a", b"a\0", b"aa", b"b", b"b\0", b"bb", b"bc", b"c", b"z", b"\xff", b"\xff\xff", b"\xff" * 9,
)  # fmt: skip


def _holds(interval: tuple[bytes, bytes], key: bytes) -> bool:
    low, end = interval
    if not low:
        return False
    return key == low if not end else key >= low and (end == b"\0" or key < end)


def _key_set(data: bytes) -> str:
    """Input: a byte for each key and end; the last interval is asked for. Beside a list that is searched."""
    pairs = [(_key(data[at]), _key(data[at + 1])) for at in range(0, min(len(data), 60) - 1, 2)]
    if not pairs:
        return "none"
    *granted, asked = pairs
    keys = KeySet.union([KeySet.of(granted[::2]), KeySet.of(granted[1::2])])
    for key in UNIVERSE:
        assert (key in keys) == any(_holds(interval, key) for interval in granted), key
    if is_interval(*asked):
        wanted = [key for key in UNIVERSE if _holds(asked, key)]
        covered = keys.covers(*asked)
        # Every key of the universe that is asked for, and no end where the set has one.
        assert not covered or all(key in keys for key in wanted)
        if asked[1] == b"\0":
            assert covered == (all(key in keys for key in wanted) and len(keys.bounds) % 2 == 1)
    return f"{len(keys)}"


def _record(data: bytes) -> None:
    if data[:1] == b"u":
        user = User(auth_pb2.User.FromString(data[1:]))
        assert User(auth_pb2.User.FromString(user.record())).roles == user.roles
        assert "password" not in repr(user)
        return
    role = Role.parse(data[1:])
    again = Role.parse(role.record())
    assert (again.permissions, again.size_bytes) == (role.permissions, role.size_bytes)
    assert role.readable.bounds == again.readable.bounds


def _records() -> list[bytes]:
    role = auth_pb2.Role(name=b"r", keyPermission=[permission(READ, b"a", b"c"), permission(READWRITE, b"k", b"\0")])
    user = auth_pb2.User(name=b"u", password=b"x" * 60, roles=["r", "root"])
    return [b"r" + role.SerializeToString(), b"u" + user.SerializeToString()]


TARGETS = (
    Target("identified-entry", lambda directory: _Identified(), _entries, tokens=LETTERS, memory_max_bytes=64 << 20),
    Target("key-set", lambda directory: _key_set, lambda: [b"\2\4\4\6\2\6", bytes(range(16))], examples=150),
    Target("user-records", lambda directory: _record, _records, (DecodeError, UnicodeDecodeError)),
)
