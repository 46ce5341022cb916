"""What a candidate does, before (PRE_CANDIDATE) and in an election: ask for votes and count them.

A pre-candidate asks whether it *would* be voted for in the next term and raises its term only if a quorum says so.
Then somebody who comes back from a partition with an old log cannot depose a working leader (thesis section 9.6).
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

from . import confchange
from .errors import DROPPED_NO_LEADER, ProposalDropped
from .quorum import VoteResult
from .types import NONE, Message, MessageType, StateRole

if TYPE_CHECKING:
    from .core import Raft

_PRE_VOTE_RESPONSE: Final = MessageType.PRE_VOTE_RESPONSE
_VOTE_RESPONSE: Final = MessageType.VOTE_RESPONSE
_FROM_LEADER: Final = frozenset((MessageType.APPEND, MessageType.HEARTBEAT, MessageType.SNAPSHOT))


CAMPAIGN_TRANSFER: Final = b"CampaignTransfer"
"""Context of the vote requests of a leadership transfer: the leader itself asked for it, so leases do not hold."""


class Campaign(enum.Enum):
    """The kinds of campaign: a question (pre-election), an election, or an election that the leader asked for
    (transfer).
    """

    PRE_ELECTION = "pre-election"
    ELECTION = "election"
    TRANSFER = "transfer"


def first_campaign(raft: Raft) -> Campaign:
    """Return the campaign that a timeout begins with."""
    return Campaign.PRE_ELECTION if raft.config.pre_vote else Campaign.ELECTION


def hup(raft: Raft, campaign_kind: Campaign) -> None:
    """Campaign, if this member may.

    Arguments:
        raft: the member, in any role; a leader does nothing.
        campaign_kind: how.
    """
    # A leader has nothing to win.
    if raft.role == StateRole.LEADER:
        return
    # No voter, or waiting for a snapshot.
    if not raft.promotable():
        return
    # The configuration we would count votes by is out of date (etcd issue 7625): apply first.
    if has_unapplied_conf_change(raft):
        return
    campaign(raft, campaign_kind)


def has_unapplied_conf_change(raft: Raft) -> bool:
    """Return whether a membership change is committed that is not in force here yet."""
    log = raft.log
    low = log.applied + 1
    while low <= log.committed:
        page = log.entries(low, log.committed + 1, log.max_applying_bytes)
        if any(confchange.is_conf_change(entry) for entry in page):
            return True
        low += len(page)
    return False


def campaign(raft: Raft, campaign_kind: Campaign) -> None:
    """Become a (pre-)candidate and ask every voter for its vote; the own vote counts once it is durable.

    Arguments:
        raft: the member.
        campaign_kind: a pre-election asks for the next term without entering it; the others enter it.
    """
    if campaign_kind is Campaign.PRE_ELECTION:
        raft.become_pre_candidate()
        # Asked for the next term, which we have not entered yet.
        request, answer, term = MessageType.PRE_VOTE, _PRE_VOTE_RESPONSE, raft.term + 1
    else:
        raft.become_candidate()
        request, answer, term = MessageType.VOTE, _VOTE_RESPONSE, raft.term
    context = CAMPAIGN_TRANSFER if campaign_kind is Campaign.TRANSFER else b""
    log = raft.log
    for voter in sorted(raft.tracker.config.all_voters()):
        if voter == raft.id:
            raft.send(Message(answer, to=voter, term=term))
        else:
            raft.send(
                Message(request, to=voter, term=term, log_term=log.last_term, index=log.last_index, context=context)
            )


def step(raft: Raft, message: Message) -> None:
    """Handle a message of the present term (or a granted pre-vote for the next one).

    Arguments:
        raft: a candidate or pre-candidate.
        message: of any kind but a request for a vote, which ``Raft.step`` answers in every role.

    Raises:
        ProposalDropped: a proposal, since there is no leader to pass it on to.
    """
    kind = message.type
    # Votes count for the election that is running: a late pre-vote is no vote.
    if kind == (_PRE_VOTE_RESPONSE if raft.role == StateRole.PRE_CANDIDATE else _VOTE_RESPONSE):
        _count_vote(raft, message)
    # Somebody leads this term: follow, and handle the message in the new role.
    elif kind in _FROM_LEADER:
        raft.become_follower(message.term, message.from_)
        raft.step_role(raft, message)
    # Nobody to pass a proposal on to.
    elif kind == MessageType.PROPOSE:
        raise ProposalDropped(DROPPED_NO_LEADER)
    # Reads, transfers and TIMEOUT_NOW are lost while there is no leader; their callers ask again.


def _count_vote(raft: Raft, message: Message) -> None:
    raft.tracker.record_vote(message.from_, not message.reject)
    result = raft.tracker.vote_result()
    if result is VoteResult.WON:
        # A quorum would vote for us: now for real.
        if raft.role == StateRole.PRE_CANDIDATE:
            campaign(raft, Campaign.ELECTION)
        else:
            raft.become_leader()
    # A quorum said no. The term stays ours: a rejected pre-vote with a higher one was handled by the term rule.
    elif result is VoteResult.LOST:
        raft.become_follower(raft.term, NONE)
