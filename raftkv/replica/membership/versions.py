"""The version of each member, and the features that the cluster can use because of it.

A member states its version twice: in the metadata of every stream that it opens to another member (``introduction``),
valid as long as the stream, and in the record that it publishes through the log, which every member stores
(``apply/membership``). The introduction has priority: a member may have been started with another version.

    versions.check_capable((0, 2))        # before proposing an entry of a kind that is known from 0.2 on

An entry that a member does not know stops it, so kinds of entries from 128 on (``apply/wire``) are proposed only
when every member is known to run a version that knows them. A member of unknown version (it was added, and has never
been started; or it is older than this rule) counts as the oldest. Nothing else depends on versions.

The wire format has its own number, which changes only when an older member could not read the messages. A receiver
refuses a newer format with the raftkv version that reads it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from typing import Any, Final

from raftkv import __version__
from raftkv.apply.membership import Membership
from raftkv.errors import NotCapableError

# -- unknown peers ----------------------------------------------------------------------------------------------------
#
# Unknown peers: callers on the peer port whose id is not that of a known member. Such a caller may have become a member
# by an entry that is not applied here yet, so its introduction is stored like a member's. On a port without TLS any
# caller can claim any id, so at most ``UNKNOWN_PEERS_MAX`` are stored: beyond that, the oldest is forgotten.

UNKNOWN_PEERS_MAX: Final = 64


def forget_oldest_unknown(kept: dict[int, Any], members: Container[int]) -> None:
    """Forget the oldest unknown peer if there are too many for one more.

    Arguments:
        kept: stored values by peer id, in the order of their introductions.
        members: ids that are always kept.
    """
    unknown = [one for one in kept if one not in members]
    if len(unknown) >= UNKNOWN_PEERS_MAX:
        del kept[unknown[0]]


VERSION_KEY: Final = "raftkv-version"
WIRE_KEY: Final = "raftkv-wire"

VERSION_LENGTH_MAX: Final = 64

WIRE_FORMAT: Final = 1
"""Format of the messages between members; members that state none use the first."""

WIRE_NEEDS: Final = "0.1"
"""The first version of raftkv that reads it."""

OLDEST: Final = (0, 0)
"""The assumed version of a member of unknown version."""

_VERSION: Final = re.compile(r"(\d{1,6})\.(\d{1,6})\b.*")
_WIRE: Final = re.compile(r"(\d{1,6})(?:/([0-9A-Za-z.+-]{1,40}))?")


class Versions:
    """The versions of all members, as one member knows them.

    Arguments:
        members: members of the cluster.
        member_id: id of this member.

    Attributes:
        on_upgraded: called when a member returns with a version that stores what others publish: values that were
            published while its old version ran must be published again.
    """

    def __init__(self, members: Membership, member_id: int) -> None:
        self.on_upgraded: Callable[[], None] = _nothing
        self._members = members
        self._heard = {member_id: __version__}

    def heard(self, member_id: int, metadata: Mapping[str, Any]) -> None:
        """Record the introduction of a member.

        Arguments:
            member_id: id of the member.
            metadata: metadata of its call.
        """
        before, version = self._heard.get(member_id), str(metadata.get(VERSION_KEY, ""))[:VERSION_LENGTH_MAX]
        if before is None:
            forget_oldest_unknown(self._heard, self._members.members)
        self._heard[member_id] = version
        if before == "" and version:
            self.on_upgraded()

    def lowest_version(self) -> tuple[int, int]:
        """Return major and minor version of the oldest member; ``OLDEST`` if any is unknown."""
        return min(map(self._version_of, self._members.members), default=OLDEST)

    def check_started_capable(self, needed: tuple[int, int]) -> None:
        """Refuse a feature that any member that has ever run does not know; for membership changes themselves.

        Arguments:
            needed: as in ``check_capable``, which documents the errors. No older version can join.
        """
        started = [each for each, member in self._members.members.items() if member.clientURLs]
        if min(map(self._version_of, started), default=needed) < needed:
            raise NotCapableError

    def check_capable(self, needed: tuple[int, int]) -> None:
        """Refuse a feature that not all members know.

        Arguments:
            needed: major and minor of the first version that knows it.

        Raises:
            NotCapableError: a member runs an older or unknown version.
        """
        if self.lowest_version() < needed:
            raise NotCapableError

    def _version_of(self, member_id: int) -> tuple[int, int]:
        heard = self._heard.get(member_id)
        match = _VERSION.fullmatch(self._members.version_of(member_id) if heard is None else heard)
        return (int(match[1]), int(match[2])) if match else OLDEST


def _nothing() -> None:
    """Do nothing: the default callback."""


def introduction() -> tuple[tuple[str, str], ...]:
    """Return the metadata with which a member states its version and the format of its messages."""
    return ((VERSION_KEY, __version__), (WIRE_KEY, f"{WIRE_FORMAT}/{WIRE_NEEDS}"))


def wire_refusal(metadata: Mapping[str, Any]) -> str:
    """Return why this version cannot read the messages of a call, and what to do; empty if it can.

    Arguments:
        metadata: metadata of the call.
    """
    stated = str(metadata.get(WIRE_KEY, "1"))
    match = _WIRE.fullmatch(stated)
    if match and int(match[1]) <= WIRE_FORMAT:
        return ""
    number, needed = (match[1], match[2]) if match else (repr(stated[:50]), None)
    upgrade = f"raftkv {needed} or later" if needed else "a later raftkv"
    return (
        f"raftkv: peer format {number} is unknown to raftkv {__version__}, which reads {WIRE_FORMAT}: "
        f"upgrade the member that was called to {upgrade}"
    )
