"""What a leader sends to its followers: appends, heartbeats, snapshots.

A leader does not send while it handles a message or a proposal; it marks ``append_due`` or ``heartbeat_due``, and
``flush`` builds the messages when a Ready is taken. So the proposals, acknowledgements and reads of one turn leave in
one append and one heartbeat per follower. Only answers that concern one follower (a probe after a rejection, a nudge
after a heartbeat response) are queued at once.

Members are visited in order of id, so that equal inputs give equal messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .errors import CompactedError, InvariantError, SnapshotTemporarilyUnavailable
from .progress import REPLICATE, Progress
from .types import Entry, Message, MessageType

if TYPE_CHECKING:
    from .core import Raft

_APPEND: Final = MessageType.APPEND
_HEARTBEAT: Final = MessageType.HEARTBEAT
_SNAPSHOT: Final = MessageType.SNAPSHOT


def flush(raft: Raft) -> None:
    """Queue what has become due since the last Ready."""
    # Heartbeats first: an append behind them carries the newer commit index, and the record keeps the last one.
    if raft.heartbeat_due:
        raft.heartbeat_due = False
        context = raft.reads.context()
        for peer, progress in raft.tracker.peers:
            send_heartbeat(raft, peer, progress, context)
    if raft.append_due:
        raft.append_due = False
        committed = raft.log.committed
        for peer, progress in raft.tracker.peers:
            send_appends(raft, peer, progress, progress.can_bump_commit(committed))


def send_appends(raft: Raft, id: int, progress: Progress, tell_commit: bool) -> None:
    """Send a follower everything it may be sent now, in as many messages as that takes.

    Arguments:
        raft: a leader.
        id: of the follower.
        progress: its record.
        tell_commit: also send when there are no entries, to tell the commit index.
    """
    # A probe, which may be empty too, asks where the logs match: it needs its answer.
    quiet = raft.config.quiet_commits and progress.state is REPLICATE
    while maybe_send_append(raft, id, progress, tell_commit, quiet):
        tell_commit = False


def maybe_send_append(raft: Raft, id: int, progress: Progress, send_if_empty: bool, quiet: bool = False) -> bool:
    """Send a follower one append, or a snapshot if the log no longer has what it needs.

    Arguments:
        raft: a leader.
        id: of the follower.
        progress: its record.
        send_if_empty: also send when there are no entries, to tell the commit index or to probe.
        quiet: no answer is needed when there are no entries.

    Returns:
        whether something was sent.
    """
    log = raft.log
    next_index = progress.next
    if progress.is_paused() or (next_index > log.last_index and not send_if_empty):
        return False
    entries: list[Entry] = []
    size_bytes = 0
    try:
        previous_term = log.term(next_index - 1)
        # With a full window only empty appends go, in answer to heartbeat responses: if everything on its way was
        # lost, one of them will be rejected or acknowledged, and the window opens again.
        if next_index <= log.last_index and (progress.state is not REPLICATE or not progress.inflights.full()):
            entries, size_bytes = log.entries_to_send(next_index, raft.config.max_size_per_message_bytes)
    except CompactedError:
        return _maybe_send_snapshot(raft, id, progress)
    if not entries and not send_if_empty:
        return False
    message = Message(_APPEND, id, raft.id, raft.term, previous_term, next_index - 1, entries, log.committed)
    message.quiet = quiet and not entries
    raft.messages.append(message)
    progress.sent_entries(len(entries), size_bytes)
    progress.sent_commit = log.committed
    return True


def _maybe_send_snapshot(raft: Raft, id: int, progress: Progress) -> bool:
    # Who is not heard from would not receive it: no snapshot is made for nothing.
    if not progress.recent_active:
        return False
    log = raft.log
    try:
        snapshot = log.unstable.snapshot or log.reader.snapshot()
    except SnapshotTemporarilyUnavailable:
        return False
    if snapshot.index == 0:
        raise InvariantError(f"follower {id} needs a snapshot, but the log reader names none")
    progress.become_snapshot(snapshot.index)
    raft.send(Message(_SNAPSHOT, to=id, snapshot=snapshot))
    return True


def send_heartbeat(raft: Raft, id: int, progress: Progress, context: bytes) -> None:
    """Send a follower one heartbeat.

    Arguments:
        raft: a leader.
        id: of the follower.
        progress: its record.
        context: asks to confirm reads; empty if there are none.
    """
    # The follower may lack committed entries, or have others in their place: send no higher commit index than what
    # matches.
    commit = min(progress.match, raft.log.committed)
    raft.messages.append(Message(_HEARTBEAT, id, raft.id, raft.term, commit=commit, context=context))
    progress.sent_commit = commit
