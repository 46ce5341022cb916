"""What a follower does: take entries, heartbeats and snapshots from the leader, and pass on what only it can do.

The handlers of the leader's messages are also used by candidates, who become followers first. A follower that hears
nothing for its randomised timeout campaigns (``tick``, shared with candidates, whose election timed out likewise).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from . import candidate, confchange
from .errors import (
    DROPPED_FORWARDING_DISABLED,
    DROPPED_NO_LEADER,
    ConfChangeError,
    InvalidMessage,
    InvariantError,
    ProposalDropped,
)
from .log import REJECTED
from .types import NONE, Message, MessageType, ReadState, SnapshotMeta, StateRole

if TYPE_CHECKING:
    from .core import Raft

_APPEND: Final = MessageType.APPEND
_APPEND_RESPONSE: Final = MessageType.APPEND_RESPONSE
_HEARTBEAT: Final = MessageType.HEARTBEAT
_HEARTBEAT_RESPONSE: Final = MessageType.HEARTBEAT_RESPONSE


def tick(raft: Raft) -> None:
    """Count one tick of a follower or candidate; campaign when the timeout has passed."""
    raft.election_elapsed += 1
    if raft.election_elapsed >= raft.randomized_election_ticks and raft.promotable():
        raft.election_elapsed = 0
        candidate.hup(raft, candidate.first_campaign(raft))


def step(raft: Raft, message: Message) -> None:
    """Handle a message of the present term, or one without a term.

    Arguments:
        raft: a follower.
        message: of any kind but a request for a vote, which ``Raft.step`` answers in every role.

    Raises:
        ProposalDropped: a proposal that cannot be passed on.
    """
    kind = message.type
    # The leader appends: note that it lives, take the entries.
    if kind == _APPEND:
        raft.election_elapsed = 0
        raft.leader = message.from_
        handle_append(raft, message)
    # The leader lives.
    elif kind == _HEARTBEAT:
        raft.election_elapsed = 0
        raft.leader = message.from_
        handle_heartbeat(raft, message)
    # Proposals go to the leader.
    elif kind == MessageType.PROPOSE:
        _forward_proposal(raft, message)
    # So do reads; without a leader they are lost, and the caller asks again.
    elif kind == MessageType.READ_INDEX:
        _forward_to_leader(raft, message)
    # The leader answers a read of ours.
    elif kind == MessageType.READ_INDEX_RESPONSE:
        raft.read_states.append(ReadState(message.index, message.context))
    # The leader sends a snapshot.
    elif kind == MessageType.SNAPSHOT:
        raft.election_elapsed = 0
        raft.leader = message.from_
        handle_snapshot(raft, message)
    # A transfer is the leader's to make.
    elif kind == MessageType.TRANSFER_LEADER:
        _forward_to_leader(raft, message)
    # The leader hands over to us: campaign at once, and without a pre-vote, for nobody is cut off here.
    elif kind == MessageType.TIMEOUT_NOW:
        candidate.hup(raft, candidate.Campaign.TRANSFER)
    # Anything else is for another role, or late.


def forget_leader(raft: Raft) -> None:
    """Act as if no leader were known, so that a pre-vote can be granted at once (etcd's ForgetLeader)."""
    raft.leader = NONE


def _forward_proposal(raft: Raft, message: Message) -> None:
    if raft.leader == NONE:
        raise ProposalDropped(DROPPED_NO_LEADER)
    if raft.config.disable_proposal_forwarding:
        raise ProposalDropped(DROPPED_FORWARDING_DISABLED)
    _forward_to_leader(raft, message)


def _forward_to_leader(raft: Raft, message: Message) -> None:
    if raft.leader == NONE:
        return
    # A new message: the caller's is never changed. The sender stays, the leader answers to it.
    raft.send(
        Message(
            message.type,
            to=raft.leader,
            from_=message.from_,
            entries=message.entries,
            context=message.context,
        )
    )


def handle_append(raft: Raft, message: Message) -> None:
    """Append the leader's entries if they follow on the log here (paper section 5.3); answer once durable.

    A quiet one without entries is not answered: the leader learns nothing from that.

    Arguments:
        raft: a follower of the sender.
        message: an APPEND.

    Raises:
        InvalidMessage: its entries are not contiguous.
        InvariantError: an entry conflicts with a committed one.
    """
    log = raft.log
    index = message.index
    # Everything up to the commit index matches already; say so instead of comparing.
    if index < log.committed:
        raft.send(Message(_APPEND_RESPONSE, message.from_, raft.id, index=log.committed))
        return
    last_new = log.maybe_append(index, message.log_term, message.entries, message.commit)
    if last_new != REJECTED:
        if message.quiet and not message.entries:
            return
        raft.send(Message(_APPEND_RESPONSE, message.from_, raft.id, index=last_new))
        return
    # Tell the leader where the logs may match at best: below index, not above the term it asked for. It skips the
    # uncommitted tail of another leader term by term instead of entry by entry.
    hint, hint_term = log.find_conflict_by_term(min(index, log.last_index), message.log_term)
    raft.send(
        Message(
            _APPEND_RESPONSE,
            message.from_,
            raft.id,
            log_term=hint_term,
            index=index,
            reject=True,
            reject_hint=hint,
        )
    )


def handle_heartbeat(raft: Raft, message: Message) -> None:
    """Take over the commit index (which the leader limits to what matches) and confirm its reads.

    Arguments:
        raft: a follower of the sender.
        message: a HEARTBEAT.
    """
    raft.log.commit_to(message.commit)
    raft.messages.append(Message(_HEARTBEAT_RESPONSE, message.from_, raft.id, raft.term, context=message.context))


def handle_snapshot(raft: Raft, message: Message) -> None:
    """Begin anew from the leader's snapshot, unless this member is further already; answer once it is installed.

    Arguments:
        raft: a follower of the sender.
        message: a SNAPSHOT, whose data have arrived (duty 10 of the caller).
    """
    log = raft.log
    restored = message.snapshot is not None and restore(raft, message.snapshot)
    index = log.last_index if restored else log.committed
    raft.send(Message(_APPEND_RESPONSE, message.from_, raft.id, index=index))


def restore(raft: Raft, snapshot: SnapshotMeta) -> bool:
    """Replace log and configuration by those of a snapshot.

    Arguments:
        raft: a follower.
        snapshot: what the leader sent.

    Returns:
        ``False`` when the snapshot is of no use here, or not yet.

    Raises:
        InvalidMessage: nobody can have made this snapshot.
    """
    log = raft.log
    # We have committed as much: nothing to learn from it.
    if snapshot.index <= log.committed:
        return False
    if raft.role != StateRole.FOLLOWER:
        raise InvariantError(f"snapshot restored by a {raft.role.name.lower()}")
    try:
        config = confchange.restore(snapshot.conf_state)
    except ConfChangeError as error:
        raise InvalidMessage(f"a snapshot of members that cannot be: {error}") from None
    # A snapshot in which we are no member is not for us.
    if raft.id not in config.members():
        return False
    # Our log has this entry, hence all before it: commit it, and keep what follows.
    if log.matches(snapshot.index, snapshot.term):
        log.commit_to(snapshot.index)
        return False
    # Membership changes that were handed out and are not applied yet must not meet the snapshot's configuration. They
    # will be applied soon; the leader sends the snapshot again.
    if log.applying > log.applied:
        return False
    log.restore(snapshot)
    raft.switch_to(config)
    return True
