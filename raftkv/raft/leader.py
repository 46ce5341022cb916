"""What a leader does: append proposals, follow its followers' acknowledgements, commit, confirm reads, hand over.

The leader counts its own log like a follower's: its match index moves when its own disk has the entries (a message to
itself, ``Raft.messages_to_self``), so a commit index never rests on anything that a crash could undo, with one member
as with five. Entries commit by counting only if they are of the leader's own term (Figure 8, paper section 5.4.2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from . import confchange, replication
from .errors import (
    DROPPED_NOT_MEMBER,
    DROPPED_TRANSFER,
    DROPPED_UNCOMMITTED_LIMIT,
    ConfChangeError,
    InvalidMessage,
    InvariantError,
    ProposalDropped,
)
from .progress import PROBE, REPLICATE, SNAPSHOT, Progress
from .read_index import ReadRequest
from .types import INDEX_MAX, NONE, Entry, EntryType, Message, MessageType, ReadState, StateRole

if TYPE_CHECKING:
    from .core import Raft

_APPEND_RESPONSE: Final = MessageType.APPEND_RESPONSE
_HEARTBEAT_RESPONSE: Final = MessageType.HEARTBEAT_RESPONSE
_NORMAL: Final = EntryType.NORMAL


# -- time ------------------------------------------------------------------------------------------------------------


def tick(raft: Raft) -> None:
    """Count one tick: check the quorum every election timeout, send heartbeats every heartbeat interval."""
    raft.heartbeat_elapsed += 1
    raft.election_elapsed += 1
    if raft.election_elapsed >= raft.config.election_ticks:
        raft.election_elapsed = 0
        if raft.config.check_quorum:
            check_quorum(raft)
        # A transfer that did not succeed within an election timeout is given up: proposals flow again.
        if raft.role == StateRole.LEADER:
            raft.transferee = NONE
    if raft.role == StateRole.LEADER and raft.heartbeat_elapsed >= raft.config.heartbeat_ticks:
        raft.heartbeat_elapsed = 0
        raft.heartbeat_due = True


def check_quorum(raft: Raft) -> None:
    """Step down if no quorum was heard from since the last check (thesis section 6.2); begin a new period."""
    if not raft.tracker.quorum_active():
        raft.become_follower(raft.term, NONE)
    for _, progress in raft.tracker.peers:
        progress.recent_active = False


# -- messages --------------------------------------------------------------------------------------------------------


def step(raft: Raft, message: Message) -> None:
    """Handle a message of the present term, or one without a term.

    Arguments:
        raft: a leader.
        message: of any kind but a request for a vote, which ``Raft.step`` answers in every role.

    Raises:
        ProposalDropped: a proposal that a follower passed on and that cannot be appended now.
        InvariantError: another member leads the same term.
    """
    kind = message.type
    # A follower (or our own disk) answers an append.
    if kind == _APPEND_RESPONSE:
        progress = raft.tracker.progress.get(message.from_)
        if progress is not None:
            _handle_append_response(raft, message, progress)
    # A follower answers a heartbeat.
    elif kind == _HEARTBEAT_RESPONSE:
        progress = raft.tracker.progress.get(message.from_)
        if progress is not None:
            _handle_heartbeat_response(raft, message, progress)
    # Entries to append, passed on by a follower.
    elif kind == MessageType.PROPOSE:
        propose(raft, message.entries)
    # A read, ours or passed on.
    elif kind == MessageType.READ_INDEX:
        read_index(raft, ReadRequest(message.from_, message.context))
    # Somebody asks that message.from_ may lead.
    elif kind == MessageType.TRANSFER_LEADER:
        transfer(raft, message.from_)
    # Anything else is for another role, or late. (Another leader's append in our term cannot be.)
    elif kind in (MessageType.APPEND, MessageType.HEARTBEAT, MessageType.SNAPSHOT):
        raise InvariantError(f"two leaders in term {raft.term}: {raft.id} and {message.from_}")


def _handle_append_response(raft: Raft, message: Message, progress: Progress) -> None:
    progress.recent_active = True
    log = raft.log
    index = message.index
    # The logs do not match there: probe where they may.
    if message.reject:
        _handle_rejection(raft, message, progress)
        return
    if index > log.last_index:
        if index > INDEX_MAX:
            raise InvalidMessage(f"{message.from_} acknowledged {index}, beyond any log")
        raise InvariantError(f"{message.from_} acknowledged {index}, our log ends at {log.last_index}")
    # Old news, except that a probed follower at its known match shows that it is reachable again.
    if not progress.maybe_update(index) and not (progress.match == index and progress.state is PROBE):
        return
    if progress.state is REPLICATE:
        progress.inflights.free_to(index)
    elif progress.state is PROBE:
        progress.become_replicate()
    # Whatever snapshot it installed (perhaps not ours): the log reaches back to it, so stream again.
    elif progress.state is SNAPSHOT and progress.match + 1 >= log.first_index():
        progress.become_probe()
        progress.become_replicate()
    # Only a match beyond the commit index can move it; if it moves, every follower gets the new one.
    if index > log.committed:
        maybe_commit(raft)
    if message.from_ == raft.id:
        return
    # The window has room again, or the follower does not know the commit index yet.
    if progress.next <= log.last_index or progress.can_bump_commit(log.committed):
        raft.append_due = True
    # It has everything: the transfer can take place.
    if message.from_ == raft.transferee and progress.match == log.last_index:
        raft.send(Message(MessageType.TIMEOUT_NOW, to=message.from_))


def _handle_rejection(raft: Raft, message: Message, progress: Progress) -> None:
    probe = message.reject_hint
    # The follower names the best point it can match at and its term there; in our log everything of a higher term
    # cannot match either. Together at most one probe per term (etcd-io/raft pull 11964).
    if message.log_term > 0:
        probe, _ = raft.log.find_conflict_by_term(probe, message.log_term)
    if progress.maybe_decrement(message.index, probe):
        if progress.state is REPLICATE:
            progress.become_probe()
        replication.maybe_send_append(raft, message.from_, progress, send_if_empty=True)


def _handle_heartbeat_response(raft: Raft, message: Message, progress: Progress) -> None:
    progress.recent_active = True
    progress.paused = False
    # It lags, or may have missed a probe: nudge it. With a full window the nudge is empty, and its answer will open
    # the window if everything else was lost.
    if progress.match < raft.log.last_index or progress.state is PROBE:
        replication.maybe_send_append(raft, message.from_, progress, send_if_empty=True)
    if message.context:
        raft.reads.acknowledge(message.from_, message.context)
        _answer_confirmed_reads(raft)


# -- committing ------------------------------------------------------------------------------------------------------


def maybe_commit(raft: Raft) -> bool:
    """Advance the commit index to what a quorum holds; return whether it moved."""
    log = raft.log
    index = raft.tracker.committed()
    # Entries of earlier terms commit only together with one of our own: counting them alone is unsafe (Figure 8).
    if index <= log.committed or index < raft.term_start_index:
        return False
    log.commit_to(index)
    raft.append_due = True
    # The first commit of the term: now we know what our predecessors committed, and can answer reads.
    if raft.reads.deferred:
        for request in raft.reads.take_deferred():
            _queue_read(raft, request)
    return True


def has_committed_in_term(raft: Raft) -> bool:
    """Return whether an entry of this leader's own term is committed."""
    return raft.log.committed >= raft.term_start_index


# -- proposing -------------------------------------------------------------------------------------------------------


def append_noop(raft: Raft) -> None:
    """Append the empty entry of a new leader."""
    _append(raft, [Entry(raft.term, raft.log.last_index + 1)])


def propose_datas(raft: Raft, datas: list[bytes]) -> None:
    """Append one normal entry for each of ``datas``, all or none.

    Arguments:
        raft: a leader.
        datas: the payload of each entry.

    Raises:
        ProposalDropped: nothing was appended; the reason says why.
    """
    _check_may_propose(raft)
    size = sum(map(len, datas))
    _check_uncommitted(raft, size)
    term = raft.term
    first = raft.log.last_index + 1
    _append(raft, [Entry(term, index, data) for index, data in enumerate(datas, first)])
    raft.uncommitted_bytes += size


def propose(raft: Raft, entries: list[Entry]) -> None:
    """Append copies of entries, all or none; a membership change that is not admissible now becomes an empty entry.

    Arguments:
        raft: a leader.
        entries: their data and types count; term and index are set here.

    Raises:
        ProposalDropped: nothing was appended; the reason says why.
    """
    if not entries:
        return
    _check_may_propose(raft)
    term = raft.term
    first = raft.log.last_index + 1
    copies = [Entry(term, index, entry.data, entry.type) for index, entry in enumerate(entries, first)]
    pending = raft.pending_conf_index
    for entry in [each for each in copies if each.type != _NORMAL]:
        # An inadmissible change becomes an empty entry: its proposer sees it applied as nothing.
        if _refusal(raft, entry, pending):
            entry.data = b""
            entry.type = _NORMAL
        else:
            pending = entry.index
    # Counted as appended, or what was refused would never be uncounted.
    size = sum([len(entry.data) for entry in copies])
    _check_uncommitted(raft, size)
    raft.pending_conf_index = pending
    _append(raft, copies)
    raft.uncommitted_bytes += size


def _check_may_propose(raft: Raft) -> None:
    # Removed while leading (and configured not to step down): it must not grow the log any more.
    if raft.id not in raft.tracker.progress:
        raise ProposalDropped(DROPPED_NOT_MEMBER)
    # The target must catch up: nothing is added to the log until it leads, or the transfer is given up.
    if raft.transferee != NONE:
        raise ProposalDropped(DROPPED_TRANSFER)


def _check_uncommitted(raft: Raft, size: int) -> None:
    # One proposal of any size passes when nothing is outstanding; empty ones (no-op, leaving a joint configuration)
    # always do.
    outstanding = raft.uncommitted_bytes
    if outstanding > 0 and size > 0 and outstanding + size > raft.max_uncommitted_bytes:
        raise ProposalDropped(DROPPED_UNCOMMITTED_LIMIT)


def _refusal(raft: Raft, entry: Entry, pending: int) -> str:
    """Why a membership change may not be proposed now; empty if it may."""
    try:
        change = confchange.decode(entry.data)
    except ConfChangeError as error:
        return str(error)
    if raft.config.disable_conf_change_validation:
        return ""
    # One at a time: the next only after the last is applied here (thesis section 4.1).
    if pending > raft.log.applied:
        return f"possible unapplied conf change at index {pending} (applied to {raft.log.applied})"
    joint = raft.tracker.config.joint
    if joint and change.changes:
        return "must transition out of joint config first"
    if not joint and not change.changes:
        return "not in joint state; refusing empty conf change"
    return ""


def _append(raft: Raft, entries: list[Entry]) -> None:
    raft.log.append(entries)
    # Our own acknowledgement, once our disk has them.
    raft.messages_to_self.append(Message(_APPEND_RESPONSE, raft.id, raft.id, raft.term, index=raft.log.last_index))
    raft.append_due = True


# -- membership ------------------------------------------------------------------------------------------------------


def leave_joint(raft: Raft) -> None:
    """Propose to leave a joint configuration that leaves by itself."""
    try:
        # No data: a limit in bytes cannot refuse it.
        propose(raft, [Entry(0, 0, b"", EntryType.CONF_CHANGE_V2)])
    except ProposalDropped:
        # A transfer is in progress: the new leader will do it, or we at the next applied entry.
        pass


def after_conf_change(raft: Raft) -> None:
    """Act on a new configuration that this member still leads: commit, answer reads, send, drop a transfer."""
    # A smaller quorum may have committed more already, and confirmed reads.
    maybe_commit(raft)
    _answer_confirmed_reads(raft)
    # Tell the members the new commit index, and probe those who are new, without waiting for a heartbeat.
    raft.append_due = True
    # Who is no voter any more cannot be handed leadership.
    if raft.transferee not in raft.tracker.config.all_voters():
        raft.transferee = NONE


# -- reads -----------------------------------------------------------------------------------------------------------


def read_index(raft: Raft, request: ReadRequest) -> None:
    """Begin a linearizable read (thesis section 6.4).

    Arguments:
        raft: a leader.
        request: who asks, and with which context.
    """
    # Before the first commit of its term a leader may not know the last commits of its predecessor, however few
    # members there are. (etcd answers at once with a single member; its commit index may be old after a crash.)
    if not has_committed_in_term(raft):
        raft.reads.deferred.append(request)
    else:
        _queue_read(raft, request)


def _queue_read(raft: Raft, request: ReadRequest) -> None:
    # Nobody else could have been elected.
    if raft.tracker.is_sole_voter():
        request.index = raft.log.committed
        _answer_read(raft, request)
        return
    raft.reads.add(raft.id, request, raft.log.committed)
    raft.heartbeat_due = True


def _answer_confirmed_reads(raft: Raft) -> None:
    for request in raft.reads.take_confirmed(raft.tracker.config):
        _answer_read(raft, request)


def _answer_read(raft: Raft, request: ReadRequest) -> None:
    if request.from_ in (NONE, raft.id):
        raft.read_states.append(ReadState(request.index, request.context))
    else:
        raft.send(
            Message(
                MessageType.READ_INDEX_RESPONSE,
                to=request.from_,
                index=request.index,
                context=request.context,
            )
        )


# -- what the caller reports -----------------------------------------------------------------------------------------


def transfer(raft: Raft, id: int) -> None:
    """Hand leadership over once the other member has the whole log (thesis section 3.10); give up after an election
    timeout.

    Arguments:
        raft: a leader.
        id: of a voter; anything else does nothing.
    """
    progress = raft.tracker.progress.get(id)
    # Only a voter can lead.
    if progress is None or progress.is_learner:
        return
    if raft.transferee != NONE:
        # It is on its way already.
        if raft.transferee == id:
            return
        # The last wish counts.
        raft.transferee = NONE
    # We lead already.
    if id == raft.id:
        return
    raft.election_elapsed = 0
    raft.transferee = id
    if progress.match == raft.log.last_index:
        raft.send(Message(MessageType.TIMEOUT_NOW, to=id))
    else:
        replication.maybe_send_append(raft, id, progress, send_if_empty=True)


def report_unreachable(raft: Raft, id: int) -> None:
    """Probe a follower that a message did not reach: what was streamed behind it is likely lost too.

    Arguments:
        raft: a leader.
        id: of the follower.
    """
    progress = raft.tracker.progress.get(id)
    if progress is not None and progress.state is REPLICATE:
        progress.become_probe()


def report_snapshot(raft: Raft, id: int, ok: bool) -> None:
    """Go on with a follower after the transfer of a snapshot.

    Arguments:
        raft: a leader.
        id: of the follower.
        ok: whether the snapshot was delivered.
    """
    progress = raft.tracker.progress.get(id)
    if progress is None or progress.state is not SNAPSHOT:
        return
    # Failed: probe from the old match, not from behind a snapshot that never arrived.
    if not ok:
        progress.pending_snapshot = 0
    progress.become_probe()
    # Delivered: wait for its answer. Failed: wait for a heartbeat before the next try.
    progress.paused = True
