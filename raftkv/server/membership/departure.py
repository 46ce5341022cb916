"""How a member learns that it was removed, and stops.

    its own log says so     it applies its removal; it stops a moment later, so that the others hear what it has to say,
                            or, if they are so few that they may need its vote until they know, when they say so
    the others say so       they refuse its connections: it missed the end of its log, or was started with old data

A removed member that is needed starts again after a crash, and whoever asks it for its own removal is answered when
the others know: an operator may switch it off then.

The others know for certain: an id that has left is kept for ever, and only what is committed puts it there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from raftkv.apply.membership import Membership
from raftkv.errors import MemberRemovedError

STOP_DELAY_S: Final = 1.0
"""A removed member goes on for so long (etcd: the same), to pass on the commit of its removal."""


NEEDED_BY_MAX: Final = 2
"""Voters left, up to which they may need the vote of one that was removed, until they know that its removal is
committed: it waits for their word, which ends its connections."""


class Departure:
    """Waits for the end of this member.

    Arguments:
        member_id: of this member.
        membership: the members as applied here.
        leave: called once, when the member has to stop.
    """

    def __init__(self, member_id: int, membership: Membership, leave: Callable[[], None]) -> None:
        self._member_id = member_id
        self._membership = membership
        self._leave = leave
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False
        self._over = asyncio.Event()

    @property
    def is_removed(self) -> bool:
        """Whether the log applied here says that this member was removed."""
        return self._member_id in self._membership.removed

    def conf_changed(self) -> None:
        """The members changed: perhaps this one is none any more."""
        if self.is_removed and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(STOP_DELAY_S, self._end_unless_needed)

    def refused(self, text: str) -> bool:
        """Another member refused a connection of this one; whether that was because this one was removed.

        Arguments:
            text: of the refusal.
        """
        if not text.endswith(MemberRemovedError.text):
            return False
        self._end()
        return True

    async def wait_until_dispensable(self) -> None:
        """Return when the others know that this member was removed, if they may need its vote until they do."""
        if self.is_removed and self.may_be_needed:
            await self._over.wait()

    def close(self) -> None:
        """The member stops anyway."""
        self._is_over = True
        self._over.set()
        if self._timer is not None:
            self._timer.cancel()

    @property
    def is_known(self) -> bool:
        """Whether this member was removed and nobody needs it any more: it need not even start."""
        return self.is_removed and not self.may_be_needed

    @property
    def may_be_needed(self) -> bool:
        """Whether the voters that are left may still need the vote of this member, which was removed."""
        return sum(not member.isLearner for member in self._membership.members.values()) <= NEEDED_BY_MAX

    def _end_unless_needed(self) -> None:
        if not self.may_be_needed:
            self._end()

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._over.set()
            self._leave()
