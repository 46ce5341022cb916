"""Play one seeded stream of requests as random users on etcd 3.5.1 and on raftkv, and compare every answer.

Users, roles and permissions change all the time.

    python -m tests.compat.differential.auth_requests --seed 7 --steps 20000 --a HOST:PORT --b HOST:PORT[,HOST:PORT...]

Both stores must be new. Requests go one after the other. What etcd 3.5.1 lets through and 3.6, and so raftkv, does not
(``HOLES``) goes to raftkv alone if it would change something, and must be refused as 3.6 refuses it; the model says
when. Everything else must be answered alike: status, text, every field.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from raftkv.apply.check import check_txn
from raftkv.errors import AuthFailedError, StatusError
from raftkv.pb import auth_pb2, rpc_pb2
from tests.compat.differential.auth_model import Model
from tests.compat.differential.compare import command_line, difference
from tests.compat.differential.generator import Step
from tests.compat.differential.requests import describe_answer, one_line
from tests.compat.store import compare, delete, get, put, txn
from tests.compat.wire import Answer, Wire

NAMES: Final = ("alice", "bob", "carol", "dave")
ROLES: Final = ("r", "s", "t", "root")
KEYS: Final = (b"a", b"b", b"ba", b"c", b"d", b"e", b"f")
# Each begins with another key: of two with one beginning etcd looks at the first alone (see ``apply.auth.store``).
INTERVALS: Final = ((b"a", b""), (b"b", b"d"), (b"ba", b""), (b"c", b"e"), (b"d", b"\0"), (b"\0", b"\0"), (b"e", b"f"))
LEASES: Final = (11, 12, 13)
TTL_S: Final = 10_000
OPERATIONS_MAX: Final = 128
BAD_TOKEN: Final = "no.token"
NOBODY: Final = "nobody"
"""Calls without a token; ``STRANGER`` with a bad one."""
STRANGER: Final = "stranger"
DENIED: Final = ("PERMISSION_DENIED", "etcdserver: permission denied")
EMPTY_USER: Final = ("INVALID_ARGUMENT", "etcdserver: user name is empty")
BAD_MANAGEMENT: Final = ("INVALID_ARGUMENT", "etcdserver: invalid auth management")
BAD_TOKEN_ANSWER: Final = ("UNAUTHENTICATED", "etcdserver: invalid auth token")

AUTH, KV, LEASE = "etcdserverpb.Auth/", "etcdserverpb.KV/", "etcdserverpb.Lease/"
MAINTENANCE, CLUSTER = "etcdserverpb.Maintenance/", "etcdserverpb.Cluster/"
OPEN_IN_3_5: Final = frozenset(
    (MAINTENANCE + "Status", CLUSTER + "MemberList", LEASE + "LeaseTimeToLive", LEASE + "LeaseLeases")
)
ROOT_ONLY: Final = frozenset((MAINTENANCE + "Hash", MAINTENANCE + "HashKV"))
STATUS_ONLY: Final = frozenset((MAINTENANCE + "Status", CLUSTER + "MemberList", *ROOT_ONLY))
"""Answers of which only the status is compared: the rest differs between two clusters."""

HOLES: Final = {
    "compact": "3.5.1 lets all users compact; only root from 3.6.9 on",
    "lease without user": "3.5.1 grants and revokes leases without a user; 3.6 requires one",
    "alarms without user": "3.5.1 lists alarms without a user, and any user raises them; 3.6 requires a user, and root",
    "txn": "3.5.1 looks into no nested txn, and at no prev_kv and no lease of a put in a txn (CVE-2026-33343, -44283)",
    "interval": "3.5.1 takes intervals that hold no key",
    "reads without user": "3.5.1 shows status and members without a user (CVE-2026-33413)",
    "keys of leases": "3.5.1 shows leases and their keys to users who may not read them (CVE-2023-32082)",
    "lease of another": "etcd, 3.6 too, lets any user revoke it without keys, or attach what its owner may not write",
    "user without name": "etcd, 3.6 too, takes a call without a user for the user with an empty name",
    "no password": "etcd says which users have no password",
    "maintenance": "3.5.1 refuses maintenance as UNKNOWN 'auth: permission denied'",
}
"""Where raftkv answers as 3.6 does and not as the oracle."""


@dataclass(frozen=True)
class Call:
    """A request of a user."""

    who: str
    method: str
    request: Any


@dataclass
class Report:
    """What a run found."""

    steps: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    methods: Counter[str] = field(default_factory=Counter)
    holes: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)

    def describe(self) -> str:
        """Return the counts and every difference as text."""
        lines = [f"{self.steps} requests: {dict(self.methods)}", f"answers: {dict(self.codes)}"]
        lines += [f"deliberate differences: {dict(self.holes)}", f"differences: {len(self.differences)}"]
        return "\n".join([*lines, *self.differences])


class AuthPlayer:
    """Plays calls on both.

    Arguments:
        oracle: etcd 3.5.1.
        tested: raftkv.
        seed: of everything that is drawn.
    """

    def __init__(self, oracle: Wire, tested: Wire, seed: int) -> None:
        self._sides = (oracle, tested)
        self._random = Random(seed)
        self._seed = seed
        self._tokens: dict[str, tuple[str, str]] = {}
        self._valid: set[str] = set()
        """Whose tokens are good: a change of the password, and the end of the user, make them void."""
        self.model = Model(self._lease_keys)
        self.report = Report()

    def _lease_keys(self, lease: int) -> list[bytes]:
        """The keys of a lease, by the oracle, which shows them to any user."""
        request = rpc_pb2.LeaseTimeToLiveRequest(ID=lease, keys=True)
        answer = self._sides[0].call(LEASE + "LeaseTimeToLive", request)
        return list(answer.message.keys) if answer.message is not None else []

    # Playing.

    def run(self, steps: int) -> None:
        """Play so many calls; ends at the first difference, after which the two stores are not the same."""
        for call in self._beginning():
            self._play(call)
        while self.report.steps < steps and not self.report.differences:
            self._play(self._draw())

    def _beginning(self) -> list[Call]:
        def change(method: str, request: Any) -> Call:
            return Call(NOBODY, AUTH + method, request)

        enable = change("AuthEnable", rpc_pb2.AuthEnableRequest())
        users = [change("UserAdd", rpc_pb2.AuthUserAddRequest(name=name, password="p")) for name in NAMES]
        roles = [change("RoleAdd", rpc_pb2.AuthRoleAddRequest(name=role)) for role in ROLES[:3]]
        root = change("UserAdd", rpc_pb2.AuthUserAddRequest(name="root", password="root"))
        grant = change("UserGrantRole", rpc_pb2.AuthUserGrantRoleRequest(user="root", role="root"))
        return [*users, *roles, enable, root, enable, grant, enable]

    def _play(self, call: Call) -> None:
        tokens = self._tokens_of(call.who)
        hole, refusal = self._hole(call)
        self.report.steps += 1
        self.report.methods[call.method.partition("/")[2]] += 1
        ours = self._ask(1, call, tokens)
        if refusal is not None:
            self.report.holes[hole] += 1
            if (ours.code, ours.text) != refusal:
                self._differ(call, f"hole {hole}: expected {refusal}", None, ours)
            return
        oracle = self._ask(0, call, tokens)
        self.report.codes[f"{oracle.code} {oracle.text}"] += 1
        what = self._difference(call, oracle, ours)
        if what is not None and not self._is_deliberate(call, oracle, ours):
            self._differ(call, what, oracle, ours)
        self._note(call, oracle)

    def _ask(self, side: int, call: Call, tokens: tuple[str, str] | None) -> Answer:
        metadata = [("token", tokens[side])] if tokens is not None else []
        wire = self._sides[side]
        # What one member has answered, another may not have applied yet.
        return wire.call(call.method, call.request, 0, metadata)

    def _differ(self, call: Call, what: str, oracle: Answer | None, ours: Answer) -> None:
        lines = [f"seed {self._seed}, step {self.report.steps}: {call.who}: {what}"]
        lines.append(f"  request: {call.method} {one_line(call.request)}")
        if oracle is not None:
            lines.append(f"  a (oracle): {describe_answer(oracle)}")
        lines.append(f"  b (tested): {describe_answer(ours)}")
        self.report.differences.append("\n".join(lines))

    def _tokens_of(self, who: str) -> tuple[str, str] | None:
        """Tokens of both for a user; None: without."""
        # With a token and without users, 3.5.1 answers as to a bad one; 3.6 does not look at it.
        if who == NOBODY or not self.model.is_enabled:
            return None
        if who == STRANGER:
            return BAD_TOKEN, BAD_TOKEN
        if who not in self._tokens and self.model.passwords.get(who):
            request = rpc_pb2.AuthenticateRequest(name=who, password=self.model.passwords[who])
            oracle, ours = (wire.call(AUTH + "Authenticate", request) for wire in self._sides)
            if oracle.message is None or ours.message is None:
                self._differ(Call(who, AUTH + "Authenticate", request), "no token", oracle, ours)
                return None
            self._tokens[who] = oracle.message.token, ours.message.token
            self._valid.add(who)
        # A token from before stays in use: of users that are gone, or have another password.
        return self._tokens.get(who, (BAD_TOKEN, BAD_TOKEN))

    def _note(self, call: Call, oracle: Answer) -> None:
        """Follow the oracle."""
        if (oracle.code, oracle.text) == BAD_TOKEN_ANSWER:
            self._tokens.pop(call.who, None)
        if oracle.message is not None and isinstance(
            call.request, rpc_pb2.LeaseGrantRequest | rpc_pb2.LeaseRevokeRequest
        ):
            self.model.owners.pop(call.request.ID, None)
            if self.model.is_enabled and isinstance(call.request, rpc_pb2.LeaseGrantRequest):
                self.model.owners[call.request.ID] = call.who
        if oracle.message is not None and call.method.startswith(AUTH):
            self.model.learn(call.request)
            if isinstance(call.request, rpc_pb2.AuthUserDeleteRequest | rpc_pb2.AuthUserChangePasswordRequest):
                self._valid.discard(call.request.name)
            if not self.model.is_enabled:
                self._valid.clear()

    @staticmethod
    def _difference(call: Call, oracle: Answer, ours: Answer) -> str | None:
        if (oracle.code, oracle.text) != (ours.code, ours.text) or call.method in STATUS_ONLY or oracle.message is None:
            is_same = (oracle.code, oracle.text) == (ours.code, ours.text)
            return None if is_same else f"status: {oracle.code} {oracle.text!r}, {ours.code} {ours.text!r}"
        answers = []
        for answer in (oracle, ours):
            message = type(answer.message)()
            message.CopyFrom(answer.message)
            if isinstance(message, rpc_pb2.AuthenticateResponse):
                message.ClearField("token")
            elif isinstance(message, rpc_pb2.LeaseTimeToLiveResponse):
                message.ClearField("TTL")
                message.keys[:] = sorted(message.keys)
            elif isinstance(message, rpc_pb2.LeaseLeasesResponse):
                message.leases.sort(key=lambda lease: lease.ID)
            elif isinstance(message, rpc_pb2.AuthRoleGetResponse):
                message.perm.sort(key=lambda perm: (perm.key, perm.range_end))
            answers.append(Answer(answer.code, answer.text, message))
        return difference(Step(call.method, call.request), *answers)

    # What is deliberately different.

    def _hole(self, call: Call) -> tuple[str, tuple[str, str] | None]:
        """Name of a hole of the oracle that the call would use and that changes something, and 3.6's refusal."""
        request, who = call.request, call.who
        if isinstance(request, rpc_pb2.AuthRoleGrantPermissionRequest) and self._may_manage(who):
            perm = request.perm
            if request.HasField("perm") and perm.range_end not in (b"", b"\0") and perm.key >= perm.range_end:
                return "interval", BAD_MANAGEMENT
        if not self.model.is_enabled or (who != NOBODY and who not in self._valid):
            return "", None
        if isinstance(request, rpc_pb2.CompactionRequest) and not self.model.is_root(who):
            return "compact", EMPTY_USER if who == NOBODY else DENIED
        if isinstance(request, rpc_pb2.LeaseGrantRequest | rpc_pb2.LeaseRevokeRequest) and who == NOBODY:
            return "lease without user", EMPTY_USER
        if isinstance(request, rpc_pb2.LeaseRevokeRequest) and self.model.ends_of_another(who, request.ID):
            return "lease of another", DENIED
        if isinstance(request, rpc_pb2.PutRequest) and who != NOBODY and self.model.shuts_out(who, request):
            is_put = self.model.may_attach(who, request) and not _is_invalid(_alone(request))
            return "lease of another", DENIED if is_put else None
        if isinstance(request, rpc_pb2.AlarmRequest) and not self.model.is_root(who):
            if who == NOBODY:
                return "alarms without user", EMPTY_USER
            return "alarms without user", None if request.action == rpc_pb2.AlarmRequest.GET else DENIED
        if isinstance(request, rpc_pb2.TxnRequest) and not _is_invalid(request):
            if who != NOBODY:
                return "txn", None if self.model.may(who, request) else DENIED
            operations = [*request.success, *request.failure]
            is_nested = bool(operations) and all(part.HasField("request_txn") for part in operations)
            return "txn", EMPTY_USER if is_nested and not request.compare else None
        return "", None

    def _may_manage(self, who: str) -> bool:
        return not self.model.is_enabled or (who in self._valid and self.model.is_root(who))

    def _is_deliberate(self, call: Call, oracle: Answer, ours: Answer) -> bool:
        """Whether an answer to what changes nothing differs as 3.6 does from 3.5.1."""
        said, root = (ours.code, ours.text), self.model.is_root(call.who)
        name = None
        if call.method in ROOT_ONLY and oracle.text == "auth: permission denied" and said == DENIED and not root:
            name = "maintenance"
        elif "no password user" in oracle.text and ours.text == AuthFailedError.text:
            name = "no password"
        elif call.method in ROOT_ONLY | OPEN_IN_3_5 and said in (EMPTY_USER, BAD_TOKEN_ANSWER):
            name = "reads without user" if call.who not in self._valid else None
        elif call.method == AUTH + "UserGet" and call.who == NOBODY and said == EMPTY_USER:
            name = None if call.request.name else "user without name"
        elif call.method.startswith(LEASE) and said == DENIED and oracle.message is not None:
            leases = (
                [call.request.ID] if call.method.endswith("ToLive") else [each.ID for each in oracle.message.leases]
            )
            keys = [key for lease in leases for key in self._lease_keys(lease)]
            name = None if all(self.model.may_read(call.who, key) for key in keys) else "keys of leases"
        if name is not None:
            self.report.holes[name] += 1
        return name is not None

    # Drawing.

    def _draw(self) -> Call:
        rng = self._random
        roll = rng.random()
        if not self.model.is_enabled and roll < 0.2:
            return Call(NOBODY, AUTH + "AuthEnable", rpc_pb2.AuthEnableRequest())
        if roll < 0.3:
            # Root does most of it, so that things change.
            who = "root" if rng.random() < 0.85 else self._somebody()
            return Call(who, *self._management())
        if roll < 0.4:
            return Call(self._somebody(), *self._other())
        return Call(self._somebody(), *self._kv())

    def _somebody(self) -> str:
        return self._random.choice((*NAMES, *NAMES, *NAMES, "root", NOBODY, STRANGER))

    def _management(self) -> tuple[str, Any]:
        rng = self._random
        name, role = rng.choice((*NAMES, *NAMES, "root", "")), rng.choice((*ROLES, *ROLES, ""))
        key, end = rng.choice((*INTERVALS * 3, (b"z", b"y"), (b"z", b"z")))
        kind = rng.choice((auth_pb2.Permission.READ, auth_pb2.Permission.WRITE, auth_pb2.Permission.READWRITE))
        perm = auth_pb2.Permission(permType=kind, key=key, range_end=end)
        password = "root" if name == "root" else rng.choice(("p", "q"))
        grant_role = rpc_pb2.AuthUserGrantRoleRequest(user=name, role=role)
        revoke_role = rpc_pb2.AuthUserRevokeRoleRequest(name=name, role=role)
        choices: list[tuple[int, str, Callable[[], Any]]] = [
            (3, "UserAdd", lambda: rpc_pb2.AuthUserAddRequest(name=name, password=password)),
            (1, "UserAdd", lambda: rpc_pb2.AuthUserAddRequest(name=name, options={"no_password": True})),
            (1, "UserDelete", lambda: rpc_pb2.AuthUserDeleteRequest(name=name)),
            (
                0 if name == "root" else 1,
                "UserChangePassword",
                lambda: rpc_pb2.AuthUserChangePasswordRequest(name=name, password=password),
            ),
            (8, "UserGrantRole", lambda: grant_role),
            (0 if name == role == "root" else 3, "UserRevokeRole", lambda: revoke_role),
            (3, "RoleAdd", lambda: rpc_pb2.AuthRoleAddRequest(name=role)),
            (1, "RoleDelete", lambda: rpc_pb2.AuthRoleDeleteRequest(role=role)),
            (10, "RoleGrantPermission", lambda: rpc_pb2.AuthRoleGrantPermissionRequest(name=role, perm=perm)),
            (
                5,
                "RoleRevokePermission",
                lambda: rpc_pb2.AuthRoleRevokePermissionRequest(role=role, key=key, range_end=end),
            ),
            (2, "UserGet", lambda: rpc_pb2.AuthUserGetRequest(name=name)),
            (2, "RoleGet", lambda: rpc_pb2.AuthRoleGetRequest(role=rng.choice(("r", "s", "t", "none")))),
            (1, "UserList", rpc_pb2.AuthUserListRequest),
            (1, "RoleList", rpc_pb2.AuthRoleListRequest),
            (1, "AuthEnable", rpc_pb2.AuthEnableRequest),
            (1 if rng.random() < 0.2 else 0, "AuthDisable", rpc_pb2.AuthDisableRequest),
        ]
        _, method, make = rng.choices(choices, [weight for weight, _, _ in choices])[0]
        return AUTH + method, make()

    def _other(self) -> tuple[str, Any]:
        rng = self._random
        lease = rng.choice(LEASES)
        name, password = rng.choice((*NAMES, "root")), rng.choice(("p", "q", "root", ""))
        return rng.choice(
            (
                (LEASE + "LeaseGrant", rpc_pb2.LeaseGrantRequest(ID=lease, TTL=TTL_S)),
                (LEASE + "LeaseGrant", rpc_pb2.LeaseGrantRequest(ID=lease, TTL=TTL_S)),
                (LEASE + "LeaseRevoke", rpc_pb2.LeaseRevokeRequest(ID=lease)),
                (LEASE + "LeaseTimeToLive", rpc_pb2.LeaseTimeToLiveRequest(ID=lease, keys=rng.random() < 0.7)),
                (LEASE + "LeaseLeases", rpc_pb2.LeaseLeasesRequest()),
                (MAINTENANCE + "Status", rpc_pb2.StatusRequest()),
                (MAINTENANCE + "Alarm", rpc_pb2.AlarmRequest()),
                (MAINTENANCE + "HashKV", rpc_pb2.HashKVRequest()),
                (CLUSTER + "MemberList", rpc_pb2.MemberListRequest()),
                (KV + "Compact", rpc_pb2.CompactionRequest(revision=rng.choice((1, 2, 1 << 40)))),
                (AUTH + "Authenticate", rpc_pb2.AuthenticateRequest(name=name, password=password)),
            )
        )

    def _kv(self) -> tuple[str, Any]:
        roll = self._random.random()
        if roll < 0.35:
            return KV + "Put", self._put()
        if roll < 0.6:
            return KV + "Range", self._range()
        if roll < 0.75:
            return KV + "DeleteRange", self._delete()
        return KV + "Txn", self._txn(2)

    def _interval(self) -> tuple[bytes, bytes]:
        rng = self._random
        key = rng.choice(KEYS)
        later = [each for each in KEYS if each > key]
        return key, rng.choice((b"", b"", b"\0", *later, *later))

    def _put(self) -> Any:
        rng = self._random
        request = put(rng.choice(KEYS), rng.choice((b"1", b"22")), prev_kv=rng.random() < 0.3)
        if rng.random() < 0.3:
            request.lease = rng.choice(LEASES)
        return request

    def _range(self) -> Any:
        return get(*self._interval(), count_only=self._random.random() < 0.2)

    def _delete(self) -> Any:
        return delete(*self._interval(), prev_kv=self._random.random() < 0.4)

    def _txn(self, depth: int) -> Any:
        rng = self._random
        compares = [compare("VERSION", "GREATER", *self._compared()) for _ in range(rng.choice((0, 1, 2)))]
        branches = [[self._operation(depth) for _ in range(rng.choice((0, 1, 1, 2)))] for _ in range(2)]
        return txn(compares, *branches)

    def _compared(self) -> tuple[bytes, int, bytes]:
        key, end = self._interval()
        return key, self._random.choice((0, 1)), end

    def _operation(self, depth: int) -> Any:
        roll = self._random.random()
        if roll < 0.2 and depth:
            return self._txn(depth - 1)
        # At most one put in a branch may be of one key: deletions rule out puts of the same keys.
        return self._put() if roll < 0.5 else self._range() if roll < 0.8 else self._delete()


def _alone(put: rpc_pb2.PutRequest) -> rpc_pb2.TxnRequest:
    return rpc_pb2.TxnRequest(success=[rpc_pb2.RequestOp(request_put=put)])


def _is_invalid(request: rpc_pb2.TxnRequest) -> bool:
    """Whether a txn is refused for what it is, from any user."""
    try:
        check_txn(request, OPERATIONS_MAX)
    except StatusError:
        return True
    return False


def play(oracle: Wire, tested: Wire, seed: int, steps: int) -> Report:
    """Play so many requests; return what was found."""
    player = AuthPlayer(oracle, tested, seed)
    player.run(steps)
    return player.report


if __name__ == "__main__":
    sys.exit(command_line(play, "steps", 20_000))
