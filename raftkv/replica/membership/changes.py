"""From a wish for other members to the members after it: rules, the log, the answer.

    members = await changes.add(member, call.caller)     # applied here; StatusError: refused, before or in the log

Owns the rules, and the path that all kinds of changes share; ``apply.membership`` decides when a change is applied. A
leader that is to be removed transfers the leadership first, so that the cluster is not without one for an election
timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from google.protobuf.message import DecodeError, Message

from raftkv import errors
from raftkv.apply.membership import Membership
from raftkv.apply.wire import Caller
from raftkv.pb import admin_pb2, raft_pb2, rpc_pb2
from raftkv.pb.services import SERVICES, Method
from raftkv.raft.types import NONE, StateRole
from raftkv.replica.node.node import Node
from raftkv.rpc.client.channel import Channel
from raftkv.rpc.status import RpcError

# -- rules ----------------------------------------------------------------------------------------------------------
#
# The rules, as pure functions: etcd's conditions on the cluster before a change of its members is proposed. They keep
# an operator from losing the quorum by accident; a change that passes them is checked again when it is applied
# (``apply.membership``). All look at one ``View``, the asked member's own.
#
#     add a voter        a quorum of the voters with the new one is started, and connected here for 5 s, without it
#     add a learner      the same quorum is connected
#     remove a voter     a quorum of those that are left is started; a quorum is connected, unless it is away itself
#     remove a learner   always
#     promote            a quorum of the voters with the new one is started; the learner has 90 % of the leader's log
#     replace            as promote and remove; a quorum of the voters before and of those after is connected
#
# A member is *started* once it has published its name. ``--strict-reconfig-check=false`` leaves out all but the last.

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


PROMOTE: Final = SERVICES["raftkvpb.Peer"]["MemberPromote"]
REPLACE: Final = SERVICES["raftkvpb.Peer"]["MemberReplace"]
RETRY_S: Final = 0.05

FIRST_KNOWN_IN: Final = (0, 2)
"""The first version of raftkv that applies changes of members."""

Change = raft_pb2.MemberChange
Members = list[rpc_pb2.Member]


class _AnswerLost(Exception):
    """The leader was asked and has not answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAccess:
    """How this member reaches the others.

    Attributes:
        connected_since: loop time since when a peer is connected, None while it is not.
        channel: to a member, None if it is unknown.
        introduction: metadata that a member wants to see.
        wait_until_dispensable: returns when the others know of the removal of this member, if they need to.
    """

    connected_since: Callable[[int], float | None]
    channel: Callable[[int], Channel | None]
    introduction: Callable[[int], tuple[tuple[str, str], ...]]
    wait_until_dispensable: Callable[[], Awaitable[None]]


class Changes:
    """Checks and proposes changes of the members.

    Arguments:
        node: proposes, and knows the leader.
        membership: the members as applied here.
        ways: to other members.
        cluster_id: of the cluster.
        strict: whether changes that could lose the quorum are refused (``--strict-reconfig-check``).
        learners_max: learners that may be added (``--max-learners``).
        check_capable: refuses what needs a version that not all started members run: an older one would follow Raft's
            configuration and not the members.
    """

    def __init__(
        self,
        node: Node,
        membership: Membership,
        ways: PeerAccess,
        *,
        cluster_id: int,
        strict: bool,
        learners_max: int,
        check_capable: Callable[[tuple[int, int]], None] = lambda needed: None,
    ) -> None:
        self.cluster_id = cluster_id
        self._node = node
        self._membership = membership
        self._ways = ways
        self._strict = strict
        self._learners_max = learners_max
        self._check_capable = check_capable
        self._loop = asyncio.get_running_loop()
        self.promotions = 0
        """Learners that this member has made voters, leading."""

    async def add(self, member: rpc_pb2.Member, caller: Caller | None) -> Members:
        """Add a member, voter or learner; returns all.

        Arguments:
            member: the new one.
            caller: who asks for it.

        Raises:
            StatusError: as etcd's MemberAdd.
        """
        if self._strict:
            check_add(member.isLearner, self._view())
        record = _record(caller, Change(kind=Change.ADD, member=member))
        record.learners_max = self._learners_max
        return await self._propose(record)

    async def remove(self, member_id: int, caller: Caller | None) -> Members:
        """Remove a member; returns the others.

        Arguments:
            member_id: of the member.
            caller: who asks for it.

        Raises:
            StatusError: as etcd's MemberRemove.
        """
        if self._strict:
            check_remove(member_id, self._view())
        if member_id == self._node.leader:
            await self._hand_over(member_id, caller)
        members = await self._propose(_one(caller, Change.REMOVE, rpc_pb2.Member(ID=member_id)))
        async with self._in_time():
            await self._ways.wait_until_dispensable()
        return members

    async def update(self, member_id: int, peer_urls: tuple[str, ...], caller: Caller | None) -> Members:
        """Give a member other peer URLs; returns all.

        Arguments:
            member_id: of the member.
            peer_urls: checked.
            caller: who asks for it.

        Raises:
            StatusError: as etcd's MemberUpdate.
        """
        return await self._propose(_one(caller, Change.UPDATE, rpc_pb2.Member(ID=member_id, peerURLs=peer_urls)))

    async def promote(self, member_id: int, caller: Caller | None, is_local: bool = True) -> Members:
        """Make a learner a voter; returns all.

        Arguments:
            member_id: of the learner.
            caller: who asks for it.
            is_local: whether it came from a client here; what another member passed on is not passed on again.

        Raises:
            StatusError: as etcd's MemberPromote.
        """

        def is_done() -> bool:
            member = self._membership.members.get(member_id)
            return member is not None and not member.isLearner

        request = rpc_pb2.MemberPromoteRequest(ID=member_id)
        act = partial(self._promote_here, member_id, caller)
        return await self._at_leader(act, is_done, PROMOTE, request, caller, is_local)

    async def replace(self, old_id: int, new_id: int, caller: Caller | None, is_local: bool = True) -> Members:
        """Let a learner take the place of a member in one joint change; returns all, once that change is complete.

        Arguments:
            old_id: who goes.
            new_id: the learner, in sync.
            caller: who asks for it.
            is_local: as for ``promote``.

        Raises:
            StatusError: as etcd's MemberPromote of the one and MemberRemove of the other.
        """

        def is_done() -> bool:
            member = self._membership.members.get(new_id)
            return old_id in self._membership.removed and member is not None and not member.isLearner

        request = admin_pb2.MemberReplaceRequest(old_id=old_id, new_id=new_id)
        act = partial(self._replace_here, old_id, new_id, caller)
        return await self._at_leader(act, is_done, REPLACE, request, caller, is_local)

    async def _at_leader(
        self,
        act: Callable[[], Awaitable[Members | None]],
        is_done: Callable[[], bool],
        method: Method,
        request: Message,
        caller: Caller | None,
        is_local: bool,
    ) -> Members:
        """Do here what only the leader can judge, or have the leader do it.

        Arguments:
            act: does it on a leader; None if another leads by now.
            is_done: whether it has been done, as far as is applied here.
            method, request, caller: for the leader.
            is_local: whether it came from a client here.
        """
        deadline, may_be_done = self._loop.time() + self._node.settings.request_timeout_s, False
        while not self._node.stopped:
            answer = None
            left_s = deadline - self._loop.time()
            try:
                if self._node.role == StateRole.LEADER:
                    answer = await act()
                elif not is_local:
                    raise errors.NotLeaderError
                elif left_s > 0:
                    answer = await self._ask_leader(method, request, caller, left_s)
            except _AnswerLost:
                may_be_done = True
            except errors.StatusError:
                # The attempt whose answer was lost may be why there is nothing left to be done.
                if may_be_done and await self._finds(is_done):
                    return self._membership.list()
                raise
            if answer is not None:
                return answer
            if left_s <= 0:
                raise errors.RequestTimeoutError
            await asyncio.sleep(RETRY_S)
        raise errors.StoppedError

    async def _finds(self, is_done: Callable[[], bool]) -> bool:
        """Return whether a change is done, as far as a quorum knows."""
        try:
            await self._node.confirm_read()
        except errors.StatusError:
            return False
        return is_done()

    async def _promote_here(self, member_id: int, caller: Caller | None) -> Members:
        self._check_in_sync(member_id)
        if self._strict:
            check_promote(self._view())
        members = await self._propose(_one(caller, Change.PROMOTE, rpc_pb2.Member(ID=member_id)))
        self.promotions += 1
        return members

    async def _replace_here(self, old_id: int, new_id: int, caller: Caller | None) -> Members | None:
        node, view = self._node, self._view()
        check_replaced(old_id, new_id, view)
        self._check_in_sync(new_id)
        if self._strict:
            check_replace(old_id, new_id, view)
        if old_id == node.settings.member_id and await self._hand_over(old_id, caller):
            return None
        parts = [
            Change(kind=Change.PROMOTE, member=rpc_pb2.Member(ID=new_id)),
            Change(kind=Change.REMOVE, member=rpc_pb2.Member(ID=old_id)),
        ]
        await self._propose(_record(caller, *parts))
        # Until the joint configuration is left, the old member may be needed: it must not be switched off before.
        async with self._in_time():
            await node.wait_until(lambda: old_id in self._membership.removed)
            await self._ways.wait_until_dispensable()
        return self._membership.list()

    @contextlib.asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        """Raise ``RequestTimeoutError`` out of a block that takes too long: what it waits for may still come."""
        try:
            async with asyncio.timeout(self._node.settings.request_timeout_s):
                yield
        except TimeoutError:
            raise errors.RequestTimeoutError from None

    def _check_in_sync(self, member_id: int) -> None:
        progress = self._node.raw.status().progress
        learner, own = progress.get(member_id), progress.get(self._node.settings.member_id)
        if learner is None or own is None:
            raise errors.MemberNotFoundError
        is_here = member_id == self._node.settings.member_id or self._ways.connected_since(member_id) is not None
        check_in_sync(learner.match, own.match, is_here)

    async def _ask_leader(
        self, method: Method, request: Message, caller: Caller | None, timeout_s: float
    ) -> Members | None:
        """Have the leader do it; None if it could not be asked, or leads no more.

        Raises:
            _AnswerLost: it may do it, or have done it, and its answer is lost.
        """
        leader = self._node.leader
        channel = self._ways.channel(leader) if leader != NONE else None
        if channel is None:
            return None
        call = channel.unary(
            method.path,
            request.SerializeToString(),
            round(timeout_s, 1) or 0.1,
            (*self._ways.introduction(leader), *_caller_metadata(caller)),
            wait_for_ready=False,
        )
        asked = asyncio.ensure_future(call)
        gone = self._loop.create_task(self._node.wait_until(lambda: self._node.leader != leader))
        try:
            await asyncio.wait((asked, gone), return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise _AnswerLost  # another leads, and this one may be cut off
            return list(method.response.FromString(asked.result()).members)
        except RpcError as error:
            refusal = _refusal(error.text)
            if refusal is not None:
                raise refusal from None
            if error.definite or error.text == errors.NotLeaderError.text:
                return None
            raise _AnswerLost from None
        except DecodeError:
            raise _AnswerLost from None
        finally:
            asked.cancel()
            gone.cancel()

    async def _hand_over(self, leader: int, caller: Caller | None) -> bool:
        """Let another voter lead instead of one that is to go, if one can at once; else this costs an election.

        Returns:
            Whether another leads now.

        Raises:
            StatusError: the caller may not change the members: asked by the users of now, as applying will.
        """
        node, me = self._node, self._node.settings.member_id
        await node.confirm_read()
        self._membership.check_caller(caller)
        voters = [voter for voter in node.conf_state.voters if voter != leader]
        connected = {voter: since for voter in voters if (since := self._ways.connected_since(voter)) is not None}
        if me in voters:
            target = me
        elif connected:
            target = min(connected, key=connected.__getitem__)
        else:
            return False
        node.transfer_leader(target)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(node.settings.election_s):
                await node.wait_until(lambda: node.leader not in (NONE, leader))
        return node.leader != leader

    async def _propose(self, record: raft_pb2.MembershipChange) -> Members:
        self._check_capable(FIRST_KNOWN_IN)
        outcome = await self._node.change_members(record)
        outcome.check()
        return list(rpc_pb2.MemberListResponse.FromString(outcome.body).members)

    def _view(self) -> View:
        return View(
            self._node.settings.member_id, self._membership.members, self._ways.connected_since, self._loop.time()
        )


_BY_TEXT: Final[dict[str, type[errors.StatusError]]] = {
    error.text: error
    for error in (
        errors.MemberNotFoundError,
        errors.MemberNotLearnerError,
        errors.LearnerNotReadyError,
        errors.NotEnoughStartedMembersError,
        errors.UnhealthyError,
        errors.NotCapableError,
        errors.TooManyRequestsError,
        errors.RequestTimeoutError,
        errors.UserEmptyError,
        errors.AuthOldRevisionError,
        errors.PermissionDeniedError,
    )
}
"""Answers of the leader that the client receives; others are tried again."""


def _refusal(text: str) -> errors.StatusError | None:
    """Return what a leader has refused, in its words; None: it is to be asked again."""
    if text.startswith(errors.ConfChangeRefusedError.text):  # why follows
        return errors.ConfChangeRefusedError(text)
    known = _BY_TEXT.get(text)
    return None if known is None else known()


CALLER: Final = "raftkv-caller"
"""Metadata of what a member passes on to the leader: the user in hexadecimal, a dot, the auth revision."""


def _caller_metadata(caller: Caller | None) -> tuple[tuple[str, str], ...]:
    return () if caller is None else ((CALLER, f"{caller.user.hex()}.{caller.auth_revision}"),)


def forwarded_caller(metadata: Mapping[str, str | bytes]) -> Caller | None:
    """Return on whose behalf another member asks; None: unknown.

    Arguments:
        metadata: of its call.

    Raises:
        MalformedEntryError: it is not what a member says.
    """
    text = metadata.get(CALLER)
    if text is None:
        return None
    user, _, auth_revision = str(text).partition(".")
    try:
        return Caller(bytes.fromhex(user), int(auth_revision))
    except ValueError:
        raise errors.MalformedEntryError from None


def _record(caller: Caller | None, *parts: raft_pb2.MemberChange) -> raft_pb2.MembershipChange:
    record = raft_pb2.MembershipChange(changes=parts)
    if caller is not None:
        record.caller.CopyFrom(raft_pb2.Caller(user=caller.user, auth_revision=caller.auth_revision))
    return record


def _one(caller: Caller | None, kind: raft_pb2.MemberChange.Kind, member: rpc_pb2.Member) -> raft_pb2.MembershipChange:
    return _record(caller, Change(kind=kind, member=member))
