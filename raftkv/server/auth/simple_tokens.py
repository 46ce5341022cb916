"""Tokens that a member gave for a password: ``<secret>.<index of the log>``, known to all members by the log.

    secret = new_secret()                            # in the answer to the client, and nowhere else
    TokenGrant(user, digest_of(secret))              # in the log: every member that applies it calls ``grant``
    tokens.find(b"<secret>.<index>")                 # a Session, or None: unknown, or not used for too long

A token lives as long as it is used at this member, or an open stream holds it, and ``ttl_s`` longer. A restart forgets
all of them but the newest, which are replayed with the log, as in etcd: clients authenticate anew. Unlike etcd's, a
secret has 140 bits and what is kept and logged is its digest, by which it is found: the time of a search tells nothing
of the secret.
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
"""Letters of a secret, each one of 52: 136 bits and a little. etcd's have 16."""

TOKENS_MAX: Final = 100_000
"""Tokens that a member knows; beyond it, an old one of the user who has most goes for each new one."""

RECENT_MAX: Final = 10_000
"""Tokens that are found without a digest."""

TOKEN_BYTES_MAX: Final = 64
"""No token is longer: what is, need not be looked at."""

CANDIDATES: Final = 16
"""Old tokens that are looked at when one has to go."""

_INDEX_DIGITS_MAX: Final = 20


class User:
    """A user who was let in.

    Attributes:
        user: the name.
    """

    __slots__ = ("_caller", "user")

    def __init__(self, user: bytes) -> None:
        self.user = user
        self._caller = Caller(user, 0)

    def caller(self, auth_revision: int) -> Caller:
        """Return the user, as known by the users and roles of a revision: the present one."""
        caller = self._caller
        if caller.auth_revision != auth_revision:
            caller = self._caller = Caller(self.user, auth_revision)
        return caller


class Session(User):
    """A user who was let in, until the token ends.

    Attributes:
        used_at: when the token was last used here.
        is_over: whether it has ended.
    """

    __slots__ = ("digest", "is_over", "streams", "used_at")

    def __init__(self, user: bytes, digest: bytes, used_at: float) -> None:
        super().__init__(user)
        self.digest = digest
        self.used_at = used_at
        self.is_over = False
        self.streams = 0

    def hold(self) -> None:
        """A stream uses it from now on."""
        self.streams += 1

    def release(self) -> None:
        """The stream has ended."""
        self.streams -= 1

    @property
    def expires_at(self) -> float | None:
        """When it ends by itself, by the clock of the wall; None: it is held for as long as it is used."""
        return None


class SimpleTokens:
    """The tokens that this member knows.

    Arguments:
        clock: seconds, monotonic.
        ttl_s: how long an unused token lives.
    """

    def __init__(self, clock: Callable[[], float], ttl_s: float) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()
        self._of_user: dict[bytes, OrderedDict[bytes, None]] = {}
        self._recent: dict[bytes, Session] = {}
        """Tokens as clients send them, so that most calls need no digest: 0.7 us less."""

    def __len__(self) -> int:
        return len(self._sessions)

    def grant(self, user: bytes, digest: bytes) -> None:
        """Know a token from now on: its entry was applied.

        Arguments:
            user: who gave the password.
            digest: of the secret.
        """
        now = self._clock()
        self._expire(now)
        if len(self._sessions) >= TOKENS_MAX:
            # One without a stream, if there is one soon.
            most = max(self._of_user.values(), key=len)
            old = [self._sessions[one] for one in islice(most, CANDIDATES)]
            self._end(next((session for session in old if not session.streams), old[0]))
        self._sessions[digest] = Session(user, digest, now)
        self._of_user.setdefault(user, OrderedDict())[digest] = None

    def find(self, token: bytes) -> Session | None:
        """Return whose token it is, and count that as use; None: unknown.

        Arguments:
            token: as the client sent it.
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
        """End all tokens: users are not asked for any more, or other users have taken their place."""
        for session in self._sessions.values():
            session.is_over = True
        self._sessions.clear()
        self._of_user.clear()
        self._recent.clear()

    def _expire(self, now: float) -> None:
        """Look at two, in turn, and forget what was not used for too long; what streams hold counts as used."""
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
    """Return the secret part of a new token."""
    return "".join(secrets.choice(string.ascii_letters) for _ in range(SECRET_LETTERS))


def digest_of(secret: bytes) -> bytes:
    """Return the digest under which a secret is logged and kept."""
    return hashlib.sha256(secret).digest()


def index_of(token: bytes) -> int | None:
    """Return the index of the entry that made a token known; None: it is no token.

    Arguments:
        token: as the client sent it.
    """
    secret, _, index = token.partition(b".")
    if len(secret) != SECRET_LETTERS or not index.isdigit() or len(index) > _INDEX_DIGITS_MAX:
        return None
    return int(index)
