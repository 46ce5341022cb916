"""Tokens given for passwords: ``<secret>.<index of the log>``; all members learn them from the log.

    secret = new_secret()                            # only in the answer to the client
    TokenGrant(user, digest_of(secret))              # in the log: every member that applies it calls ``grant``
    tokens.find(b"<secret>.<index>")                 # a Session, or None: unknown, or unused for too long

A token ends ``ttl_s`` after its last use at this member, and not while an open stream holds it. A restart forgets all
tokens except the newest, which are replayed with the log, as in etcd: clients authenticate again. Unlike etcd's, a
secret has about 137 bits, and only its digest is stored and logged. Tokens are found by their digest, so the time of a
search reveals nothing about the secret.
"""

from __future__ import annotations

import hashlib
import secrets
import string
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from typing import Final

from raftkv.apply.wire import Caller

SECRET_LETTERS: Final = 24
"""Letters of a secret, each one of 52: 136 bits and a little. etcd's secrets have 16 letters."""

TOKENS_MAX: Final = 100_000
"""Tokens that a member knows; when there are more, each new one replaces an old one of the user with most tokens."""

RECENT_MAX: Final = 10_000
"""Tokens that are found without computing a digest."""

TOKEN_BYTES_MAX: Final = 64
"""No token is longer, so longer ones are not looked up."""

CANDIDATES: Final = 16
"""Old tokens that are considered when one has to be dropped."""

_INDEX_DIGITS_MAX: Final = 20


class User:
    """An authenticated user.

    Attributes:
        user: name of the user.
    """

    __slots__ = ("_caller", "user")

    def __init__(self, user: bytes) -> None:
        self.user = user
        self._caller = Caller(user, 0)

    def caller(self, auth_revision: int) -> Caller:
        """Return the user as a caller under a revision of users and roles, which must be the current one."""
        caller = self._caller
        if caller.auth_revision != auth_revision:
            caller = self._caller = Caller(self.user, auth_revision)
        return caller


class Session(User):
    """A user authenticated by a token, until the token ends.

    Attributes:
        used_at: when the token was last used here.
        is_over: whether the token has ended.
    """

    __slots__ = ("digest", "is_over", "streams", "used_at")

    def __init__(self, user: bytes, digest: bytes, used_at: float) -> None:
        super().__init__(user)
        self.digest = digest
        self.used_at = used_at
        self.is_over = False
        self.streams = 0

    def hold(self) -> None:
        """Note a stream that uses the token."""
        self.streams += 1

    def release(self) -> None:
        """Note that such a stream has ended."""
        self.streams -= 1

    @property
    def expires_at(self) -> float | None:
        """When the token expires, by the wall clock; always None: it lives as long as it is used."""
        return None


class SimpleTokens:
    """The tokens that this member knows.

    Arguments:
        clock: returns monotonic seconds.
        ttl_s: lifetime of an unused token.
    """

    def __init__(self, clock: Callable[[], float], ttl_s: float) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()
        self._of_user: dict[bytes, OrderedDict[bytes, None]] = {}
        self._recent: dict[bytes, Session] = {}
        """Tokens as sent by clients, so that most calls compute no digest, which saves 0.7 us."""

    def __len__(self) -> int:
        return len(self._sessions)

    def grant(self, user: bytes, digest: bytes) -> None:
        """Add a token: its entry was applied.

        Arguments:
            user: user of the token.
            digest: digest of the secret.
        """
        now = self._clock()
        self._expire(now)
        if len(self._sessions) >= TOKENS_MAX:
            # Prefer one without a stream, among the oldest.
            most = max(self._of_user.values(), key=len)
            old = [self._sessions[one] for one in islice(most, CANDIDATES)]
            self._end(next((session for session in old if not session.streams), old[0]))
        self._sessions[digest] = Session(user, digest, now)
        self._of_user.setdefault(user, OrderedDict())[digest] = None

    def find(self, token: bytes) -> Session | None:
        """Return the session of a token, and count this as use; None: the token is unknown.

        Arguments:
            token: token sent by the client.
        """
        session = self._recent.get(token)
        if session is None or session.is_over:
            session = self._search(token)
            if session is None:
                return None
        now = self._clock()
        if now - session.used_at > self._ttl_s and not session.streams:
            self._end(session)
            return None
        session.used_at = now
        return session

    def _search(self, token: bytes) -> Session | None:
        if len(token) > TOKEN_BYTES_MAX:
            return None
        session = self._sessions.get(digest_of(token.partition(b".")[0]))
        if session is not None:
            if len(self._recent) >= RECENT_MAX:
                self._recent.clear()
            self._recent[token] = session
        return session

    def forget_user(self, user: bytes) -> None:
        """End all tokens of a user: the password was changed, or the user deleted."""
        for digest in list(self._of_user.get(user, ())):
            self._end(self._sessions[digest])

    def forget_all(self) -> None:
        """End all tokens: authentication was disabled, or the users were replaced."""
        for session in self._sessions.values():
            session.is_over = True
        self._sessions.clear()
        self._of_user.clear()
        self._recent.clear()

    def _expire(self, now: float) -> None:
        """Check two tokens in turn, and drop those unused for too long; tokens held by streams count as used."""
        for session in list(islice(self._sessions.values(), 2)):
            if session.streams or now - session.used_at <= self._ttl_s:
                self._sessions.move_to_end(session.digest)
            else:
                self._end(session)

    def _end(self, session: Session) -> None:
        session.is_over = True
        del self._sessions[session.digest]
        of_user = self._of_user[session.user]
        del of_user[session.digest]
        if not of_user:
            del self._of_user[session.user]


def new_secret() -> str:
    """Return the secret of a new token."""
    return "".join(secrets.choice(string.ascii_letters) for _ in range(SECRET_LETTERS))


def digest_of(secret: bytes) -> bytes:
    """Return the digest under which a secret is logged and stored."""
    return hashlib.sha256(secret).digest()


def index_of(token: bytes) -> int | None:
    """Return the log index in a token; None: it is not a token.

    Arguments:
        token: token sent by the client.
    """
    secret, _, index = token.partition(b".")
    if len(secret) != SECRET_LETTERS or not index.isdigit() or len(index) > _INDEX_DIGITS_MAX:
        return None
    return int(index)
