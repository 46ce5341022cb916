"""What is asked of the cluster before a change of its members is proposed: etcd's rules, as pure functions.

They keep an operator from losing the quorum by accident; a change that passes them is checked again when it is applied
(``apply.membership``). All look at one ``View``, the asked member's own.

    add a voter        a quorum of the voters with the new one is started, and connected here for 5 s, without it
    add a learner      the same quorum is connected
    remove a voter     a quorum of those that are left is started; a quorum is connected, unless it is away itself
    remove a learner   always
    promote            a quorum of the voters with the new one is started; the learner has 90 % of the leader's log
    replace            as promote and remove; a quorum of the voters before and of those after is connected

A member is *started* once it has published its name. ``--strict-reconfig-check=false`` leaves out all but the last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from raftkv import errors
from raftkv.pb import rpc_pb2

HEALTH_INTERVAL_S: Final = 5.0
"""How long members must be connected to count as healthy (etcd: HealthInterval)."""

READY_PERCENT: Final = 90
"""How much of the leader's log a learner must have to be promoted (etcd: readyPercent)."""


@dataclass(frozen=True, slots=True)
class View:
    """The cluster as a member sees it.

    Attributes:
        member_id: of this member.
        members: all, by id.
        connected_since: time at which a peer was connected, None while it is not.
        now: the present, on the same clock.
    """

    member_id: int
    members: Mapping[int, rpc_pb2.Member]
    connected_since: Callable[[int], float | None]
    now: float

    def voters(self) -> list[rpc_pb2.Member]:
        """Return those that vote."""
        return [member for member in self.members.values() if not member.isLearner]

    def connected(self) -> int:
        """Return how many voters were connected all the last ``HEALTH_INTERVAL_S``, with this member itself."""
        return sum(self.is_connected(member.ID) for member in self.voters())

    def is_connected(self, member_id: int) -> bool:
        """Return whether a member was connected all the last ``HEALTH_INTERVAL_S``."""
        if member_id == self.member_id:
            return True
        since = self.connected_since(member_id)
        return since is not None and since < self.now - HEALTH_INTERVAL_S


def check_add(is_learner: bool, view: View) -> None:
    """Refuse to add a member when that could lose the quorum.

    Arguments:
        is_learner: whether it is to be one.
        view: of the asked member.

    Raises:
        NotEnoughStartedMembersError, UnhealthyError: it could.
    """
    voters = view.voters()
    if not is_learner:
        started = sum(bool(member.name) for member in voters)
        # One started member of two to be: the way from one member to more, for which there is no other.
        if not (started == 1 and len(voters) == 1) and started < _quorum(len(voters) + 1):
            raise errors.NotEnoughStartedMembersError
    # The new one may never come. (etcd before 3.6.11 wants all voters to be connected.)
    if len(voters) > 1 and view.connected() < _quorum(len(voters) + 1):
        raise errors.UnhealthyError


def check_remove(member_id: int, view: View) -> None:
    """Refuse to remove a member when that could lose the quorum.

    Arguments:
        member_id: of the one to go, known or not.
        view: of the asked member.

    Raises:
        NotEnoughStartedMembersError, UnhealthyError: it could.
    """
    member = view.members.get(member_id)
    if member is not None and member.isLearner:
        return
    voters = view.voters()
    left = [each for each in voters if member_id != each.ID]
    if sum(bool(each.name) for each in left) < _quorum(len(left)):
        raise errors.NotEnoughStartedMembersError
    # One that is away is no part of the quorum that works now.
    if member_id != view.member_id and view.connected_since(member_id) is None:
        return
    if view.connected() - 1 < _quorum(len(voters) - 1):
        raise errors.UnhealthyError


def check_promote(view: View) -> None:
    """Refuse to make a learner a voter when that could lose the quorum.

    Raises:
        NotEnoughStartedMembersError: it could.
    """
    voters = view.voters()
    started = 1 + sum(bool(member.name) for member in voters)
    if started < _quorum(len(voters) + 1):
        raise errors.NotEnoughStartedMembersError


def check_replaced(old_id: int, new_id: int, view: View) -> None:
    """Refuse what is no learner in the place of what is no voter.

    Arguments:
        old_id, new_id: who goes, who comes.
        view: of the leader.

    Raises:
        MemberNotFoundError: one of them is unknown, or the old one has no vote to give.
        MemberNotLearnerError: the new one votes already.
    """
    old, new = view.members.get(old_id), view.members.get(new_id)
    if old is None or new is None or old.isLearner:
        raise errors.MemberNotFoundError
    if not new.isLearner:
        raise errors.MemberNotLearnerError


def check_replace(old_id: int, new_id: int, view: View) -> None:
    """Refuse to let a learner take the place of a voter when that could lose the quorum of either half.

    Arguments:
        old_id, new_id: a voter, and a learner in sync.
        view: of the leader.

    Raises:
        NotEnoughStartedMembersError, UnhealthyError: it could.
    """
    voters = view.voters()
    after = [each for each in voters if old_id != each.ID] + [view.members[new_id]]
    if sum(bool(each.name) for each in after) < _quorum(len(after)):
        raise errors.NotEnoughStartedMembersError
    stay = sum(view.is_connected(each.ID) for each in after if new_id != each.ID)
    if stay + 1 < _quorum(len(after)) or view.connected() < _quorum(len(voters)):
        raise errors.UnhealthyError


def check_in_sync(match: int, leader_match: int, is_connected: bool) -> None:
    """Refuse a learner that does not have the log yet.

    Arguments:
        match, leader_match: how far the logs of the learner and of the leader are known to reach.
        is_connected: whether the leader reaches it now.

    Raises:
        LearnerNotReadyError: it lags, or is away.
    """
    if not is_connected or match * 100 < leader_match * READY_PERCENT:
        raise errors.LearnerNotReadyError


def _quorum(voters: int) -> int:
    return voters // 2 + 1
