"""Membership changes: the rules before a change is proposed, the proposal, and the result.

    members = await changes.add(member, call.caller)     # applied here; StatusError: refused, before or in the log

This module has the rules, and the path that all kinds of changes share; ``apply.membership`` decides when a change is
applied. A leader that is to be removed transfers leadership first, so that the cluster is not without a leader for an
election timeout.
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
# The rules, as pure functions: etcd's conditions on the cluster before a membership change is proposed. They protect an
# operator from losing the quorum by accident; a change that passes them is checked again when it is applied
# (``apply.membership``). All of them use one ``View``, that of the member that got the request.
#
#     add a voter        a quorum of the voters including the new one is started, and connected here for 5 s, without it
#     add a learner      the same quorum is connected
#     remove a voter     a quorum of the remaining voters is started; a quorum is connected, unless the voter is away
#     remove a learner   always
#     promote            a quorum of the voters with the new one is started; the learner has 90 % of the leader's log
#     replace            as promote and remove; a quorum of the old and of the new voters is connected
#
# A member is *started* once it has published its name. ``--strict-reconfig-check=false`` skips all but the last rule.

HEALTH_INTERVAL_S: Final = 5.0
"""Seconds for which members must be connected to count as healthy (etcd: HealthInterval)."""

READY_PERCENT: Final = 90
"""Percentage of the leader's log that a learner must have to be promoted (etcd: readyPercent)."""


@dataclass(frozen=True, slots=True)
class View:
    """The cluster as a member sees it.

    Attributes:
        member_id: id of this member.
        members: all members, by id.
        connected_since: returns the time at which a peer was connected; ``None`` while it is not.
        now: current time on the same clock.
    """

    member_id: int
    members: Mapping[int, rpc_pb2.Member]
    connected_since: Callable[[int], float | None]
    now: float

    def voters(self) -> list[rpc_pb2.Member]:
        """Return the voters."""
        return [member for member in self.members.values() if not member.isLearner]

    def connected(self) -> int:
        """Return the number of voters connected for at least ``HEALTH_INTERVAL_S``, including this member."""
        return sum(self.is_connected(member.ID) for member in self.voters())

    def is_connected(self, member_id: int) -> bool:
        """Return whether a member has been connected for at least ``HEALTH_INTERVAL_S``."""
        if member_id == self.member_id:
            return True
        since = self.connected_since(member_id)
        return since is not None and since < self.now - HEALTH_INTERVAL_S


def check_add(is_learner: bool, view: View) -> None:
    """Refuse to add a member if that could lose the quorum.

    Arguments:
        is_learner: whether the new member is a learner.
        view: view of the member that got the request.

    Raises:
        NotEnoughStartedMembersError, UnhealthyError: it could.
    """
    voters = view.voters()
    if not is_learner:
        started = sum(bool(member.name) for member in voters)
        # One started member of two: the only way to extend a single-member cluster.
        if not (started == 1 and len(voters) == 1) and started < _quorum(len(voters) + 1):
            raise errors.NotEnoughStartedMembersError
    # The new member may never start. (etcd before 3.6.11 requires all voters to be connected.)
    if len(voters) > 1 and view.connected() < _quorum(len(voters) + 1):
        raise errors.UnhealthyError


def check_remove(member_id: int, view: View) -> None:
    """Refuse to remove a member if that could lose the quorum.

    Arguments:
        member_id: id of the member to remove, known or not.
        view: view of the member that got the request.

    Raises:
        NotEnoughStartedMembersError, UnhealthyError: the quorum could be lost.
    """
    member = view.members.get(member_id)
    if member is not None and member.isLearner:
        return
    voters = view.voters()
    left = [each for each in voters if member_id != each.ID]
    if sum(bool(each.name) for each in left) < _quorum(len(left)):
        raise errors.NotEnoughStartedMembersError
    # A disconnected member is not part of the current quorum.
    if member_id != view.member_id and view.connected_since(member_id) is None:
        return
    if view.connected() - 1 < _quorum(len(voters) - 1):
        raise errors.UnhealthyError


def check_promote(view: View) -> None:
    """Refuse to make a learner a voter if that could lose the quorum.

    Raises:
        NotEnoughStartedMembersError: the quorum could be lost.
    """
    voters = view.voters()
    started = 1 + sum(bool(member.name) for member in voters)
    if started < _quorum(len(voters) + 1):
        raise errors.NotEnoughStartedMembersError


def check_replaced(old_id: int, new_id: int, view: View) -> None:
    """Refuse a replacement unless the new member is a learner and the old one a voter.

    Arguments:
        old_id, new_id: ids of the old and of the new member.
        view: view of the leader.

    Raises:
        MemberNotFoundError: one of them is unknown, or the old one is not a voter.
        MemberNotLearnerError: the new one is already a voter.
    """
    old, new = view.members.get(old_id), view.members.get(new_id)
    if old is None or new is None or old.isLearner:
        raise errors.MemberNotFoundError
    if not new.isLearner:
        raise errors.MemberNotLearnerError


def check_replace(old_id: int, new_id: int, view: View) -> None:
    """Refuse to replace a voter by a learner if that could lose the quorum of either half.

    Arguments:
        old_id, new_id: a voter, and a learner in sync.
        view: view of the leader.

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
    """Refuse a learner whose log lags too far.

    Arguments:
        match, leader_match: known last indexes of the logs of the learner and of the leader.
        is_connected: whether the leader is connected to it now.

    Raises:
        LearnerNotReadyError: the learner lags, or is disconnected.
    """
    if not is_connected or match * 100 < leader_match * READY_PERCENT:
        raise errors.LearnerNotReadyError


def _quorum(voters: int) -> int:
    return voters // 2 + 1


PROMOTE: Final = SERVICES["raftkvpb.Peer"]["MemberPromote"]
REPLACE: Final = SERVICES["raftkvpb.Peer"]["MemberReplace"]
RETRY_S: Final = 0.05

FIRST_KNOWN_IN: Final = (0, 2)
"""The first version of raftkv that applies membership changes."""

Change = raft_pb2.MemberChange
Members = list[rpc_pb2.Member]


class _AnswerLost(Exception):
    """The leader was asked and has not responded."""


class Changes:
    """Checks and proposes membership changes.

    Arguments:
        node: proposes, and knows the leader.
        membership: the members as applied here.
        cluster_id: id of the cluster.
        strict: whether changes that could lose the quorum are refused (``--strict-reconfig-check``).
        learners_max: maximum number of learners (``--max-learners``).
        connected_since: returns the loop time at which a peer was connected; ``None`` while it is not.
        channel: returns the connection to a member, ``None`` if it is unknown.
        wait_until_dispensable: returns when the others know of the removal of this member, if they need to.
        check_capable: refuses a change if any started member runs a version that does not know it: such a member would
            follow Raft's configuration and not the members.
    """

    def __init__(
        self,
        node: Node,
        membership: Membership,
        *,
        cluster_id: int,
        strict: bool,
        learners_max: int,
        connected_since: Callable[[int], float | None],
        channel: Callable[[int], Channel | None],
        wait_until_dispensable: Callable[[], Awaitable[None]],
        check_capable: Callable[[tuple[int, int]], None] = lambda needed: None,
    ) -> None:
        self.cluster_id = cluster_id
        self._node = node
        self._membership = membership
        self._connected_since = connected_since
        self._channel = channel
        self._wait_until_dispensable = wait_until_dispensable
        self._strict = strict
        self._learners_max = learners_max
        self._check_capable = check_capable
        self._loop = asyncio.get_running_loop()
        self.promotions = 0
        """Number of learners that this member, as leader, has made voters."""

    async def add(self, member: rpc_pb2.Member, caller: Caller | None) -> Members:
        """Add a member, voter or learner; return all members.

        Arguments:
            member: the new member.
            caller: caller of the request.

        Raises:
            StatusError: as in etcd's MemberAdd.
        """
        if self._strict:
            check_add(member.isLearner, self._view())
        record = _record(caller, Change(kind=Change.ADD, member=member))
        record.learners_max = self._learners_max
        return await self._propose(record)

    async def remove(self, member_id: int, caller: Caller | None) -> Members:
        """Remove a member; return the others.

        Arguments:
            member_id: id of the member.
            caller: caller of the request.

        Raises:
            StatusError: as in etcd's MemberRemove.
        """
        if self._strict:
            check_remove(member_id, self._view())
        if member_id == self._node.leader:
            await self._hand_over(member_id, caller)
        members = await self._propose(_one(caller, Change.REMOVE, rpc_pb2.Member(ID=member_id)))
        async with self._in_time():
            await self._wait_until_dispensable()
        return members

    async def update(self, member_id: int, peer_urls: tuple[str, ...], caller: Caller | None) -> Members:
        """Change the peer URLs of a member; return all members.

        Arguments:
            member_id: id of the member.
            peer_urls: new URLs, already checked.
            caller: caller of the request.

        Raises:
            StatusError: as in etcd's MemberUpdate.
        """
        return await self._propose(_one(caller, Change.UPDATE, rpc_pb2.Member(ID=member_id, peerURLs=peer_urls)))

    async def promote(self, member_id: int, caller: Caller | None, is_local: bool = True) -> Members:
        """Make a learner a voter; return all members.

        Arguments:
            member_id: id of the learner.
            caller: caller of the request.
            is_local: whether it came from a client here; a request forwarded by another member is not forwarded again.

        Raises:
            StatusError: as in etcd's MemberPromote.
        """

        def is_done() -> bool:
            member = self._membership.members.get(member_id)
            return member is not None and not member.isLearner

        request = rpc_pb2.MemberPromoteRequest(ID=member_id)
        act = partial(self._promote_here, member_id, caller)
        return await self._at_leader(act, is_done, PROMOTE, request, caller, is_local)

    async def replace(self, old_id: int, new_id: int, caller: Caller | None, is_local: bool = True) -> Members:
        """Replace a member by a learner in one joint change; return all members once that change is complete.

        Arguments:
            old_id: id of the member to remove.
            new_id: id of the learner, in sync.
            caller: caller of the request.
            is_local: as in ``promote``.

        Raises:
            StatusError: as in etcd's MemberPromote of the new and MemberRemove of the old member.
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
        """Execute a change here if this member leads, or on the leader.

        Arguments:
            act: does it on a leader; returns ``None`` if another member leads by now.
            is_done: returns whether it has been done, according to the state applied here.
            method, request, caller: request for the leader.
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
                # An earlier attempt, whose response was lost, may have done the change already.
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
        # Until the joint configuration is left, the old member may be needed: it must not be switched off earlier.
        async with self._in_time():
            await node.wait_until(lambda: old_id in self._membership.removed)
            await self._wait_until_dispensable()
        return self._membership.list()

    @contextlib.asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        """Raise ``RequestTimeoutError`` from a block that takes too long; the awaited event may still happen."""
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
        is_here = member_id == self._node.settings.member_id or self._connected_since(member_id) is not None
        check_in_sync(learner.match, own.match, is_here)

    async def _ask_leader(
        self, method: Method, request: Message, caller: Caller | None, timeout_s: float
    ) -> Members | None:
        """Make the leader do it; return ``None`` if it could not be asked, or no longer leads.

        Raises:
            _AnswerLost: the leader may do it, or have done it, but its response is lost.
        """
        leader = self._node.leader
        channel = self._channel(leader) if leader != NONE else None
        if channel is None:
            return None
        call = channel.unary(
            method.path,
            request.SerializeToString(),
            round(timeout_s, 1) or 0.1,
            _caller_metadata(caller),
            wait_for_ready=False,
        )
        asked = asyncio.ensure_future(call)
        gone = self._loop.create_task(self._node.wait_until(lambda: self._node.leader != leader))
        try:
            await asyncio.wait((asked, gone), return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise _AnswerLost  # another member leads, and this one may be partitioned
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
        """Transfer leadership from a leader that is to be removed, if another voter can lead at once.

        Returns:
            Whether another member leads now. If not, the removal costs an election.

        Raises:
            StatusError: the caller may not change the members: checked with the current users, as applying will do.
        """
        node, me = self._node, self._node.settings.member_id
        await node.confirm_read()
        self._membership.check_caller(caller)
        voters = [voter for voter in node.conf_state.voters if voter != leader]
        connected = {voter: since for voter in voters if (since := self._connected_since(voter)) is not None}
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
        return View(self._node.settings.member_id, self._membership.members, self._connected_since, self._loop.time())


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
"""Responses of the leader that are passed to the client; others are retried."""


def _refusal(text: str) -> errors.StatusError | None:
    """Return the leader's refusal as an error; ``None``: ask the leader again."""
    if text.startswith(errors.ConfChangeRefusedError.text):  # followed by the reason
        return errors.ConfChangeRefusedError(text)
    known = _BY_TEXT.get(text)
    return None if known is None else known()


CALLER: Final = "raftkv-caller"
"""Metadata of requests forwarded to the leader: the user in hexadecimal, a dot, the auth revision."""


def _caller_metadata(caller: Caller | None) -> tuple[tuple[str, str], ...]:
    return () if caller is None else ((CALLER, f"{caller.user.hex()}.{caller.auth_revision}"),)


def forwarded_caller(metadata: Mapping[str, str | bytes]) -> Caller | None:
    """Return the caller on whose behalf another member sends a request; ``None``: unknown.

    Arguments:
        metadata: metadata of the call.

    Raises:
        MalformedEntryError: the metadata is malformed.
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
