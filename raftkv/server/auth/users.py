"""The parts of authentication, put together; they know nothing of each other.

users = Users(config, applier, node, slices)
server = Server(..., around=(users.guard.around,))
users.serve(server, responder)       # the Auth service
replica.connect(..., check_rights=users.live.applied, forget_tokens=users.tokens.forget_all)
"""

from __future__ import annotations

import asyncio
import time

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
        config: of the member.
        applier: users and rights, as applied.
        node: of the member.
        slices: does long work.

    Attributes:
        guard: wraps the handlers of the client ports.
        live: the calls that last.
        tokens: those that went through the log.
    """

    def __init__(self, config: ServerConfig, applier: Applier, node: Node, slices: Slices) -> None:
        self._auth = applier.auth
        self._rights = applier.rights
        self._service: AuthService | None = None
        self.tokens = SimpleTokens(asyncio.get_running_loop().time, config.auth_token_ttl_s)
        options = parse_options(config.auth_token)
        self._signed = None if options is None else JWTTokens(options, time.time, self._hash_of)
        self._callers = Callers(self._signed or self.tokens, lambda: node.applied)
        self._passwords = Passwords(config.bcrypt_cost, config.auth_min_password_length)
        self.live = LiveCalls(applier.auth, applier.rights, self._callers, slices)
        self.guard = Guard(
            applier.auth, applier.rights, self._callers, self.live, node, slices, txn_operations_max=config.max_txn_ops
        )

        applier.auth.on_token_grant.append(self.granted)
        applier.auth.on_password_change.append(self.tokens.forget_user)
        applier.auth.on_change.append(self.changed)

    def serve(self, server: Server, responder: Responder) -> None:
        """Serve the Auth service, and find callers for reads that wait.

        Arguments:
            server: of the client ports.
            responder: the member's shared parts.
        """
        responder.caller_of = self.caller_of
        self._service = AuthService(responder, self._passwords, self._signed, self.caller_of)
        self._service.register(server)

    @property
    def waiting_passwords(self) -> int:
        """Passwords that wait to be hashed or compared."""
        return self._passwords.waiting

    def granted(self, user: bytes, digest: bytes, index: int) -> None:
        """A user has got a token.

        Arguments:
            user, digest: whose it is, and the digest of its secret.
            index: of its entry.
        """
        self.tokens.grant(user, digest)
        if self._service is not None:
            self._service.granted(digest, index)

    def changed(self) -> None:
        """Users, rights, or whether users are asked for may have changed."""
        if not self._auth.is_enabled:
            self.tokens.forget_all()
        self.live.changed()

    def _hash_of(self, user: bytes, auth_revision: int) -> bytes | None:
        """Return the hash of a user's password now; None: the users here are older than a revision."""
        if auth_revision > self._auth.revision:
            return None
        found = self._auth.users.get(user)
        return b"" if found is None else found.password_hash

    def caller_of(self, call: ServerCall) -> Caller | None:
        """Return who makes a call, by now. Raises InvalidAuthTokenError: the token has ended."""
        credential = self._callers.credential(call.headers, call.peer)
        return None if credential is None else credential.caller(self._auth.revision)

    def caller_over_http(self, request: HttpRequest) -> Caller | None:
        """Return who sends a plain request. ``Authorization`` alone names the user, as for ``/v3``.

        A certificate may be that of a proxy, which says nothing about its users (CVE-2018-16886).

        Raises:
            InvalidAuthTokenError: an unknown token.
        """
        token = request.header("authorization").encode("latin-1", "replace")
        headers = ((GATEWAY, b""), *(((AUTHORIZATION, token),) if token else ()))
        credential = self._callers.credential(headers, request)
        return None if credential is None else credential.caller(self._auth.revision)

    def check_root(self, request: HttpRequest) -> bytes:
        """Return the name of the user who sends a plain request; empty: users are not asked for.

        Raises:
            StatusError: there is no user, or it has not the role root.
        """
        if not self._auth.is_enabled:
            return b""
        caller = self.caller_over_http(request)
        self._rights.check_root(caller)
        return b"" if caller is None else caller.user

    def close(self) -> None:
        """Let go of the threads: the member stops."""
        self._passwords.close()
