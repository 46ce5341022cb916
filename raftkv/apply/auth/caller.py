"""Who causes a request: as the member that took it found out, and as its entry says to all.

>>> Caller(b"alice", 7)
Caller(user=b'alice', auth_revision=7)

Three kinds of callers reach the log: a user; a member of its own accord (``MEMBER``); and nobody, ``None``, while users
are not asked for. What nobody asked for is refused as soon as they are.
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
"""A member that does what nobody asked it for: it raises an alarm, compacts by its own rule."""
