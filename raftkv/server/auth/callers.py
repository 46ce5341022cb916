"""The caller of an RPC: the user of a token in the metadata, else the name in a verified certificate, else none.

    credential = callers.credential(call.headers, call.peer)      # None: no user; raises for an invalid token
    caller = credential.caller(auth.revision)                     # the caller as entries of the log name it

A token comes first, as in etcd: a caller with a bad token is refused, even with a good certificate. A certificate
counts only if the connection was made with it and its chain was verified. A call forwarded by a gateway shows the
gateway's own certificate, which says nothing about the caller (CVE-2018-16886).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from raftkv import errors
from raftkv.apply.wire import USER_NAME_BYTES_MAX
from raftkv.rpc.status import Headers
from raftkv.rpc.tls import common_name_of
from raftkv.server.auth.jwt_tokens import JWTTokens, Signed
from raftkv.server.auth.simple_tokens import Session, SimpleTokens, User, index_of

if TYPE_CHECKING:
    from raftkv.rpc.server.calls import Peer
    from raftkv.rpc.server.http import HttpRequest

TOKEN: Final = b"token"
AUTHORIZATION: Final = b"authorization"
BEARER: Final = b"Bearer "
GATEWAY: Final = b"grpcgateway-accept"
"""Metadata that etcd's gateway adds to forwarded calls."""

_NAMES: Final = frozenset((TOKEN, AUTHORIZATION, GATEWAY))
NAMED_MAX: Final = 10_000
"""Certificate users that are remembered; creating one takes a microsecond."""


class NamedByCertificate(User):
    """A user whose name is in a verified certificate."""

    __slots__ = ()

    is_over = False
    expires_at = None

    def hold(self) -> None:
        """Do nothing: the connection shows the certificate."""

    release = hold


Credential = Session | Signed | NamedByCertificate
"""A token or certificate of a caller; it may end before the call does."""


class TokenAheadError(errors.InvalidAuthTokenError):
    """A token that may become known: this member is behind the one that gave it.

    Attributes:
        is_known: returns whether this member has caught up.
    """

    def __init__(self, is_known: Callable[[], bool]) -> None:
        super().__init__()
        self.is_known = is_known


class Callers:
    """Determines the callers of calls.

    Arguments:
        tokens: tokens of the kind that this member is configured to use.
        applied: returns the index of the newest entry applied here.
    """

    def __init__(self, tokens: SimpleTokens | JWTTokens, applied: Callable[[], int]) -> None:
        self._tokens = tokens
        self._applied = applied
        self._is_simple = isinstance(tokens, SimpleTokens)
        self._named: dict[str, NamedByCertificate] = {}

    def credential(self, headers: Headers, peer: Peer | HttpRequest) -> Credential | None:
        """Return the credential of a caller, or None.

        Arguments:
            headers: headers of the request, names in lower case.
            peer: peer of the connection, or the HTTP request.

        Raises:
            TokenAheadError: the token may become known in a moment.
            InvalidAuthTokenError: the token is unknown.
        """
        token, is_passed_on = None, False
        for name, value in headers:
            # The RPC layer has hashed the names already, and few of them are in the set.
            if name in _NAMES:
                if name == TOKEN:
                    token = value
                    break
                if name == GATEWAY:
                    is_passed_on = True
                elif token is None:
                    token = value
        if token is None:
            return None if is_passed_on else self._by_certificate(peer)
        token = token.removeprefix(BEARER)
        found = self._tokens.find(token)
        # An empty user name would stand for a member.
        if found is not None and 0 < len(found.user) <= USER_NAME_BYTES_MAX:
            if isinstance(found, Signed) and found.is_ahead:
                raise TokenAheadError(lambda: not found.is_ahead)
            return found
        index = index_of(token) if self._is_simple else None
        if index is not None and index > self._applied():
            raise TokenAheadError(lambda: self._applied() >= index)
        raise errors.InvalidAuthTokenError

    def _by_certificate(self, peer: Peer | HttpRequest) -> Credential | None:
        if not peer.certificate:
            return None
        name = common_name_of(peer.certificate)
        found = self._named.get(name)
        if found is None and name:
            if len(self._named) >= NAMED_MAX:
                self._named.clear()
            found = self._named[name] = NamedByCertificate(name.encode())
        return found
