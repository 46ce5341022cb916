"""The Auth service: authentication, and changes of users and roles.

    Authenticate   the password is compared on this member, against the users of one revision; then the token goes
                   through the log, so that every member knows it; repeated if users have changed meanwhile. A signed
                   token needs no log
    changes        passwords are hashed here; then the change goes through the log, with its caller, like any write
    questions      answered from the state applied here, after a confirmation by a quorum

Passwords are dropped from requests as soon as they are hashed or compared (CVE-2021-28235), and go into no entry.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from raftkv import errors
from raftkv.apply.auth.records import ROOT, ROOT_USER
from raftkv.apply.auth.rights import Rights
from raftkv.apply.auth.store import AuthStore
from raftkv.apply.wire import MEMBER, USER_NAME_BYTES_MAX, Caller, Kind, field
from raftkv.loop.scheduler import Work, encoded, in_order
from raftkv.pb import auth_pb2, raft_pb2, rpc_pb2
from raftkv.pb.services import SERVICES
from raftkv.rpc.server.calls import ServerCall, UnaryCall
from raftkv.rpc.server.server import Server
from raftkv.rpc.shares import Identity, identity_of, queue_of_call
from raftkv.server.auth.jwt_tokens import JWTTokens
from raftkv.server.auth.passwords import Passwords, costs_of, decoy_cost, is_hash
from raftkv.server.auth.simple_tokens import digest_of, new_secret
from raftkv.server.services.responder import Handler, Responder

_METHODS: Final = SERVICES["etcdserverpb.Auth"]
TRIES_MAX: Final = 100
"""How often an operation is retried because users have changed, before the caller gets an error."""

_ROOT_PERMISSION: Final = field(2, auth_pb2.Permission(permType="READWRITE", range_end=b"\0").SerializeToString())
"""The rights of the role root as etcd shows them; permissions granted to it are not shown."""

CHANGES: Final = {
    "AuthEnable": "enable",
    "AuthDisable": "disable",
    "UserAdd": "user_add",
    "UserDelete": "user_delete",
    "UserChangePassword": "user_change_password",
    "UserGrantRole": "user_grant_role",
    "UserRevokeRole": "user_revoke_role",
    "RoleAdd": "role_add",
    "RoleDelete": "role_delete",
    "RoleGrantPermission": "role_grant_permission",
    "RoleRevokePermission": "role_revoke_permission",
}
"""Methods that are one entry of the log, and the field of the entry."""


@dataclass(frozen=True, slots=True)
class Listing:
    """An answer with a list, which is field 2 of its message.

    Arguments:
        take: returns the items, which must not change afterwards; called when the call's turn comes, since there may be
            very many items, and many calls.
        size: approximate number of items.
        encode: encodes one item.
        is_sorted: whether the items are already in the order of the answer.
    """

    take: Callable[[], list[bytes]]
    size: int
    encode: Callable[[bytes], bytes]
    is_sorted: bool

    def work(self) -> Work[list[bytes]]:
        """Encode the items in order, with pauses."""
        items = self.take()
        ordered = items if self.is_sorted else (yield from in_order(items))
        return (yield from encoded(ordered, self.encode))


class AuthService:
    """Handlers of etcdserverpb.Auth.

    Arguments:
        responder: shared parts of the member.
        passwords: hashes and compares passwords.
        signer: signs tokens; None: tokens go through the log.
        caller: returns the current caller of a call; raises for an invalid token.
    """

    def __init__(
        self,
        responder: Responder,
        passwords: Passwords,
        signer: JWTTokens | None,
        caller: Callable[[ServerCall], Caller | None],
    ) -> None:
        self._responder = responder
        self._auth: AuthStore = responder.applier.auth
        self._rights = responder.applier.rights
        self._passwords = passwords
        self._signer = signer
        self._caller = caller
        self._costs: tuple[int, list[int]] = -1, []
        """Costs of all users' hashes, at a revision of the users."""
        self._granting: dict[bytes, int] = {}
        """Digests of tokens proposed by this member, with the indexes of their entries."""

    def register(self, server: Server) -> None:
        """Register all methods."""
        questions = {
            "Authenticate": self._authenticate,
            "AuthStatus": self._question(self._status),
            "UserGet": self._question(self._user_get),
            "UserList": self._listing(self._user_list),
            "RoleGet": self._listing(self._role_get),
            "RoleList": self._listing(self._role_list),
        }
        for name, handler in questions.items():
            self._responder.serve(server, _METHODS[name], handler, confirms=True)
        for name, change in CHANGES.items():
            self._responder.serve(server, _METHODS[name], self._change(change))

    # -- authentication ----------------------------------------------------------------------------------------------

    async def _authenticate(self, request: rpc_pb2.AuthenticateRequest, call: UnaryCall) -> bytes:
        """Return a token for a password."""
        token = await self._token(request.name.encode(), request.password, call.peer.identity)
        return self._responder.answer(rpc_pb2.AuthenticateResponse(token=token))

    async def _token(self, user: bytes, password: str, address: Identity) -> str:
        checked: bytes | int | None = None
        for _ in range(TRIES_MAX):
            revision = self._auth.revision
            # Users change often; the password of one user hardly ever.
            hashed = self._hash_of(user)
            if checked != hashed:
                name = user if isinstance(hashed, bytes) else b""
                if not await self._passwords.matches(password, hashed, address, name):
                    raise errors.AuthFailedError
                checked = hashed
            token = await self._granted(user, revision)
            if token is not None:
                return token
        raise errors.AuthOldRevisionError

    def _hash_of(self, name: bytes) -> bytes | int:
        """Return the hash of a user's password. For a name without one, return the cost that hides this.

        Raises:
            AuthNotEnabledError: as in etcd.
        """
        auth = self._auth
        if not auth.is_enabled:
            raise errors.AuthNotEnabledError
        if self._costs[0] != auth.revision:
            self._costs = auth.revision, costs_of(user.password_hash for user in auth.users.values())
        root, user = auth.users.get(ROOT_USER), auth.users.get(name)
        cost = decoy_cost(name, root.password_hash if root else b"", self._costs[1])
        if user is not None and user.has_password and is_hash(user.password_hash):
            return user.password_hash
        return self._passwords.cost if cost is None else cost

    async def _granted(self, user: bytes, revision: int) -> str | None:
        """Return a token for a user whose password was correct at a revision; None: users have changed since."""
        if self._auth.revision != revision:
            return None
        if self._signer is not None:
            return self._signer.sign(user, revision, self._auth.users[user].password_hash)
        secret = new_secret()
        digest = digest_of(secret.encode())
        grant = raft_pb2.TokenGrant(user=user, token_sha256=digest, auth_revision=revision)
        self._granting[digest] = 0
        try:
            await self._responder.propose_versioned(Kind.AUTH, raft_pb2.AuthChange(token_grant=grant), MEMBER, user)
        except errors.AuthOldRevisionError:
            return None
        finally:
            index = self._granting.pop(digest)
        return f"{secret}.{index}"

    def granted(self, digest: bytes, index: int) -> None:
        """Store the index of a token's entry, if this member proposed it."""
        if digest in self._granting:
            self._granting[digest] = index

    # -- changes -----------------------------------------------------------------------------------------------------

    def _change(self, field: str) -> Handler:
        async def handle(request: Any, call: UnaryCall) -> bytes:
            await self._prepare(request)
            # Hashing may wait for long: after a deletion, a user of the same name is a different user.
            self._responder.check_again(call, Rights.check_root)
            # Changes that are applied before this one do not void it, unless they take the role root from the caller.
            change = raft_pb2.AuthChange(**{field: request})
            outcome = await self._responder.propose_versioned(Kind.AUTH, change, call.caller, identity_of(call))
            return self._header(outcome.revision) + outcome.body

        return handle

    async def _prepare(self, request: Any) -> None:
        """Hash the password of a request, and refuse names that no entry can carry."""
        if isinstance(request, rpc_pb2.AuthUserAddRequest):
            if len(request.name.encode()) > USER_NAME_BYTES_MAX:
                raise errors.UserNameTooLongError
            if request.options.no_password:
                request.ClearField("password")
                request.ClearField("hashedPassword")
                return
        elif not isinstance(request, rpc_pb2.AuthUserChangePasswordRequest):
            return
        password = request.password
        request.ClearField("password")
        if request.hashedPassword and not password:
            _check_hash(request.hashedPassword)
        elif not password and isinstance(request, rpc_pb2.AuthUserChangePasswordRequest):
            # As in etcd, no password is right after a change to the empty one; a user added with it may log in.
            self._passwords.check(password)
        else:
            request.hashedPassword = base64.b64encode(await self._passwords.hash(password)).decode()

    # -- questions ---------------------------------------------------------------------------------------------------

    def _question(self, answer: Callable[[Any, Caller | None], Any]) -> Handler:
        async def handle(request: Any, call: UnaryCall) -> bytes:
            return self._responder.answer(answer(request, self._asker(call)))

        return handle

    def _asker(self, call: UnaryCall) -> Caller | None:
        """Return the caller, under the current users."""
        return self._caller(call) if self._auth.is_enabled else MEMBER

    def _listing(self, answer: Callable[[Any, Caller | None], Listing]) -> Handler:
        """Return the handler of a question whose answer is a list. It may be long, so it is built in slices."""

        async def handle(request: Any, call: UnaryCall) -> list[bytes]:
            def work() -> Work[list[bytes]]:  # under the users and roles at the time of its turn
                head, now = self._header(self._responder.revision()), answer(request, self._asker(call))
                return [head, *(yield from now.work())]

            size = answer(request, self._asker(call)).size
            return await self._responder.slices.result(work, size, queue_of_call(call))

        return handle

    def _status(self, _request: Any, _caller: Caller | None) -> rpc_pb2.AuthStatusResponse:
        return rpc_pb2.AuthStatusResponse(enabled=self._auth.is_enabled, authRevision=self._auth.revision)

    def _user_get(self, request: rpc_pb2.AuthUserGetRequest, caller: Caller | None) -> rpc_pb2.AuthUserGetResponse:
        name = request.name.encode()
        self._rights.check_known(caller)
        if caller is None or caller.user != name:
            self._rights.check_root(caller)
        user = self._auth.users.get(name)
        if user is None:
            raise errors.UserNotFoundError
        return rpc_pb2.AuthUserGetResponse(roles=user.message.roles)

    def _user_list(self, _request: Any, caller: Caller | None) -> Listing:
        self._rights.check_root(caller)
        return Listing(lambda: list(self._auth.users), len(self._auth.users), _name, is_sorted=False)

    def _role_get(self, request: rpc_pb2.AuthRoleGetRequest, caller: Caller | None) -> Listing:
        self._rights.check_known(caller)
        if caller is None or not self._auth.has_role(caller.user, request.role):
            self._rights.check_root(caller)
        role = self._auth.roles.get(request.role)
        if role is None:
            raise errors.RoleNotFoundError
        if request.role == ROOT:
            return Listing(lambda: [_ROOT_PERMISSION], 1, bytes, is_sorted=True)
        return Listing(role.fields, len(role.permissions), bytes, is_sorted=True)

    def _role_list(self, _request: Any, caller: Caller | None) -> Listing:
        self._rights.check_root(caller)
        return Listing(
            lambda: [name.encode() for name in self._auth.roles], len(self._auth.roles), _name, is_sorted=False
        )

    def _header(self, revision: int) -> bytes:
        return self._responder.header.encode(revision, self._responder.node.term)


def _check_hash(text: str) -> None:
    """Refuse a hash sent by a client, unless it is a bcrypt hash with an affordable cost."""
    try:
        hashed = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        hashed = b""
    if not is_hash(hashed):
        raise errors.InvalidPasswordError("raftkv: hashedPassword must be a bcrypt hash in base64, of a cost up to 16")


def _name(name: bytes) -> bytes:
    return field(2, name.decode("utf-8", "replace").encode())
