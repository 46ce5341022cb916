"""A state machine with auth: changes of users and roles, and requests of users.

machine = AuthMachine()
machine.change(user_add={"name": "alice", "hashedPassword": "aGFzaA=="})
machine.secure()                                   # root, and users are asked for
machine.outcome(put(b"a"), "alice")                # the outcome of an entry of alice
"""

from __future__ import annotations

import base64
from typing import Any, cast

from raftkv.apply.applier import Outcome
from raftkv.apply.wire import MEMBER, Caller, Kind, identified, versioned
from raftkv.pb import auth_pb2, raft_pb2
from tests.apply.machine import KINDS, Machine

HASH = b"$2b$10$" + b"h" * 53
HASHED = base64.b64encode(HASH).decode()
READ, WRITE, READWRITE = auth_pb2.Permission.READ, auth_pb2.Permission.WRITE, auth_pb2.Permission.READWRITE


def permission(kind: int, key: bytes, range_end: bytes = b"") -> auth_pb2.Permission:
    return auth_pb2.Permission(permType=cast("auth_pb2.Permission.Type", kind), key=key, range_end=range_end)


class AuthMachine(Machine):
    """A state machine with auth."""

    def caller(self, name: str) -> Caller:
        """Return a user as admitted at the present auth revision."""
        return Caller(name.encode(), self.applier.auth.revision)

    def entry(self, kind: int, body: bytes, caller: Caller | None, *, is_answered: bool = True) -> Outcome:
        """Apply an entry of a caller; None: a bare one."""
        if caller is not None:
            kind, body = Kind.IDENTIFIED, identified(caller, kind, body)
        outcome = self.applier.apply(kind, body, is_answered=is_answered)
        self.store.set_applied(self.store.applied_index + 1, 1)
        return outcome

    def outcome(self, request: Any, who: str | Caller | None) -> Outcome:
        """Apply a request of a user, named or as a caller."""
        kind, body = KINDS[type(request)][0], request.SerializeToString()
        return self.entry(kind, body, self.caller(who) if isinstance(who, str) else who)

    def change(self, *, who: str | Caller | None = None, **change: Any) -> type[Exception] | None:
        """Apply a change of users or roles, as root once auth is enabled. Returns the class of its refusal."""
        body = versioned(Kind.AUTH, raft_pb2.AuthChange(**change).SerializeToString())
        if who is None and self.applier.auth.is_enabled:
            who = "root"
        outcome = self.entry(Kind.AUTH, body, self.caller(who) if isinstance(who, str) else who)
        return None if outcome.error is None else type(outcome.error)

    def add_user(self, name: str, *roles: str) -> None:
        """Add a user with a password, and roles that exist."""
        assert self.change(user_add={"name": name, "hashedPassword": HASHED}) is None
        for role in roles:
            assert self.change(user_grant_role={"user": name, "role": role}) is None

    def add_role(self, name: str, *permissions: auth_pb2.Permission) -> None:
        """Add a role."""
        assert self.change(role_add={"name": name}) is None
        for each in permissions:
            assert self.change(role_grant_permission={"name": name, "perm": each}) is None

    def secure(self) -> None:
        """Add root and enable auth."""
        self.add_user("root", "root")
        assert self.change(enable={}) is None

    def grant_token(
        self, user: str, revision: int | None = None, who: Caller | None = MEMBER
    ) -> type[Exception] | None:
        """Apply the grant of a token."""
        at = self.applier.auth.revision if revision is None else revision
        grant = raft_pb2.TokenGrant(user=user.encode(), token_sha256=b"s" * 32, auth_revision=at)
        return self.change(who=who, token_grant=grant)
