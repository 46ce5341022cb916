"""Who causes a request: as the member that took it found out, and as its entry says to all.

>>> Caller(b"alice", 7)
Caller(user=b'alice', auth_revision=7)

Three kinds of callers reach the log: a user; a member that acts by itself (``MEMBER``); and, while users are not asked
for, nobody (``None``). Once users are asked for, an entry without a caller is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

USER_NAME_BYTES_MAX: Final = 0xFFFF
"""Longest name that an entry can carry."""


@dataclass(frozen=True, slots=True)
class Caller:
    """A user, as known by the users and roles of one moment.

    Attributes:
        user: the name; empty: a member.
        auth_revision: of the users and roles by which the caller was let in.
    """

    user: bytes
    auth_revision: int


MEMBER: Final = Caller(b"", 0)
"""A member that acts by itself, not for a client: it raises an alarm, or compacts by its own rule."""
