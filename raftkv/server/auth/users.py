"""Creates the parts of authentication and connects them; they do not depend on each other.

users = Users(config, applier, node, slices)
server = Server(..., around=(users.guard.around,))
users.serve(server, responder)       # the Auth service
replica.connect(..., check_rights=users.live.applied, forget_tokens=users.tokens.forget_all)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from raftkv.apply.applier import Applier
from raftkv.apply.wire import Caller
from raftkv.config import ServerConfig
from raftkv.loop.scheduler import Slices
from raftkv.replica.node.node import Node
from raftkv.rpc.server.calls import ServerCall
from raftkv.rpc.server.http import HttpRequest
from raftkv.rpc.server.server import Server
from raftkv.server.auth.callers import AUTHORIZATION, GATEWAY, Callers
from raftkv.server.auth.guard import Guard, LiveCalls
from raftkv.server.auth.jwt_tokens import JWTTokens, parse_options
from raftkv.server.auth.passwords import Passwords
from raftkv.server.auth.service import AuthService
from raftkv.server.auth.simple_tokens import SimpleTokens
from raftkv.server.services.responder import Responder


class Users:
    """Tokens, callers and live calls of one member.

    Arguments:
        config: settings of the member.
        applier: has the applied users and rights.
        node: node of the member.
        slices: runs long work.

    Attributes:
        guard: wraps the handlers of the client ports.
        live: the long calls.
        tokens: tokens that went through the log.
    """

    def __init__(self, config: ServerConfig, applier: Applier, node: Node, slices: Slices) -> None:
        self._auth = applier.auth
        self._rights = applier.rights
        self._service: AuthService | None = None
        self.tokens = SimpleTokens(asyncio.get_running_loop().time, config.auth_token_ttl_s)
        options = parse_options(config.auth_token)
        self._signed = None if options is None else JWTTokens(options, time.time, self._hash_of)
        self._callers = Callers(self._signed or self.tokens, lambda: node.applied)
        self.passwords = Passwords(config.bcrypt_cost, config.auth_min_password_length)
        self.live = LiveCalls(applier.auth, applier.rights, self._callers, slices)
        self.guard = Guard(
            applier.auth, applier.rights, self._callers, self.live, node, slices, txn_operations_max=config.max_txn_ops
        )

        applier.auth.on_token_grant.append(self.granted)
        applier.auth.on_password_change.append(self.tokens.forget_user)
        applier.auth.on_change.append(self.changed)

    def serve(self, server: Server, responder: Responder) -> None:
        """Register the Auth service, and provide callers for reads that wait.

        Arguments:
            server: server of the client ports.
            responder: shared parts of the member.
        """
        responder.caller_of = self.caller_of
        self._service = AuthService(responder, self.passwords, self._signed, self.caller_of)
        self._service.register(server)

    def granted(self, user: bytes, digest: bytes, index: int) -> None:
        """Add the token of a user: its entry was applied.

        Arguments:
            user, digest: user, and digest of the secret.
            index: index of the entry.
        """
        self.tokens.grant(user, digest)
        if self._service is not None:
            self._service.granted(digest, index)

    def changed(self) -> None:
        """Note that users, rights, or whether authentication is enabled may have changed."""
        if not self._auth.is_enabled:
            self.tokens.forget_all()
        self.live.changed()

    def _hash_of(self, user: bytes, auth_revision: int) -> bytes | None:
        """Return the current hash of a user's password; None: the users here are older than the revision."""
        if auth_revision > self._auth.revision:
            return None
        found = self._auth.users.get(user)
        return b"" if found is None else found.password_hash

    def caller_of(self, call: ServerCall) -> Caller | None:
        """Return the current caller of a call. Raises InvalidAuthTokenError: the token has ended."""
        credential = self._callers.credential(call.headers, call.peer)
        return None if credential is None else credential.caller(self._auth.revision)

    def check_user(self, request: HttpRequest) -> bytes:
        """Return the name of the user of a plain request; empty: authentication is off.

        Raises:
            StatusError: there is no user, or an unknown one.
        """
        return self._checked(request, self._rights.check_user)

    def check_root(self, request: HttpRequest) -> bytes:
        """Return the name of the user as ``check_user`` does.

        Raises:
            StatusError: there is no user, or the user does not have the role root.
        """
        return self._checked(request, self._rights.check_root)

    def _checked(self, request: HttpRequest, check: Callable[[Caller | None], None]) -> bytes:
        """Check the user of a plain request. Only ``Authorization`` names the user, as for ``/v3``.

        A certificate may be that of a proxy, which says nothing about its users (CVE-2018-16886).
        """
        if not self._auth.is_enabled:
            return b""
        token = request.header("authorization").encode("latin-1", "replace")
        headers = ((GATEWAY, b""), *(((AUTHORIZATION, token),) if token else ()))
        credential = self._callers.credential(headers, request)
        check(None if credential is None else credential.caller(self._auth.revision))
        return b"" if credential is None else credential.user

    def close(self) -> None:
        """Stop the password threads: the member stops."""
        self.passwords.close()
