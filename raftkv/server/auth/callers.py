"""The caller of an RPC: a token in the metadata, else the name in a verified certificate, else none.

    credential = callers.credential(call.headers, call.peer)      # None: no user; raises for a token that is none
    caller = credential.caller(auth.revision)                     # what entries of the log carry

A token comes first, as in etcd: a caller with a bad one is refused, even with a good certificate. A certificate counts
only if the connection was made with it and its chain was verified; a call that a gateway passes on shows the gateway's
own, which says nothing of who calls (CVE-2018-16886).
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
"""Metadata that etcd's gateway adds to what it passes on."""

_NAMES: Final = frozenset((TOKEN, AUTHORIZATION, GATEWAY))
NAMED_MAX: Final = 10_000
"""Users of certificates that are remembered: one is made anew in a microsecond."""


class NamedByCertificate(User):
    """A user whose name is in a verified certificate."""

    __slots__ = ()

    is_over = False
    expires_at = None

    def hold(self) -> None:
        """Do nothing: a certificate is shown by the connection."""

    release = hold


Credential = Session | Signed | NamedByCertificate
"""A token or certificate that a caller has shown: it may end before the call does."""


class TokenAheadError(errors.InvalidAuthTokenError):
    """A token that may become known: its entry is not applied here yet.

    Attributes:
        index: of the entry.
    """

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index


class Callers:
    """Finds out who calls.

    Arguments:
        tokens: of the kind that this member was told to use.
        applied: index of the newest entry that is applied here.
    """

    def __init__(self, tokens: SimpleTokens | JWTTokens, applied: Callable[[], int]) -> None:
        self._tokens = tokens
        self._applied = applied
        self._is_simple = isinstance(tokens, SimpleTokens)
        self._named: dict[str, NamedByCertificate] = {}

    def credential(self, headers: Headers, peer: Peer | HttpRequest) -> Credential | None:
        """Return what the caller has shown; None: nothing.

        Arguments:
            headers: of the request, names in lower case.
            peer: who sent it.

        Raises:
            TokenAheadError: a token that may become known in a moment.
            InvalidAuthTokenError: an unknown token.
        """
        token, is_passed_on = None, False
        for name, value in headers:
            # The RPC layer has hashed the names already, and few are ours.
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
        # A caller without a name would be a member.
        if found is not None and 0 < len(found.user) <= USER_NAME_BYTES_MAX:
            return found
        index = index_of(token) if self._is_simple else None
        if index is not None and index > self._applied():
            raise TokenAheadError(index)
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
