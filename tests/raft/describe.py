"""Text forms of the core's objects, for golden tests.

One line per thing, fields in a fixed order, zero fields left out, so that equal states give equal texts::

    2->1 APPEND_RESPONSE term=1 index=4 reject hint=2/1
    voters=(1 2 4)&&(1 2 3) learners_next=(3) autoleave
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from raftkv.raft import confchange
from raftkv.raft.confchange import Configuration
from raftkv.raft.core import Raft
from raftkv.raft.describe import describe_conf_change, describe_data
from raftkv.raft.errors import ConfChangeError
from raftkv.raft.tracker import Progress
from raftkv.raft.types import (
    NONE,
    ConfState,
    Entry,
    EntryType,
    HardState,
    Message,
    MessageType,
    Ready,
    SnapshotMeta,
    StateRole,
)

_INDENT = "  "


def describe_entry(entry: Entry) -> str:
    """Return ``term/index``, the kind unless it is normal, and the data."""
    if entry.type == EntryType.NORMAL:
        return f"{entry.term}/{entry.index} {describe_data(entry.data)}"
    try:
        text = describe_conf_change(confchange.decode(entry.data))
    except ConfChangeError as error:
        text = f"({error})"
    return f"{entry.term}/{entry.index} {EntryType(entry.type).name} {text}"


def _ids(members: Iterable[int]) -> str:
    return "(" + " ".join(str(member) for member in sorted(members)) + ")"


def _voters(incoming: Collection[int], outgoing: Collection[int]) -> str:
    return _ids(incoming) + (f"&&{_ids(outgoing)}" if outgoing else "")


def describe_conf_state(state: ConfState) -> str:
    """Return voters (of both halves when joint), learners, and learners to be."""
    words = [f"voters={_voters(state.voters, state.voters_outgoing)}"]
    if state.learners:
        words.append(f"learners={_ids(state.learners)}")
    if state.learners_next:
        words.append(f"learners_next={_ids(state.learners_next)}")
    if state.auto_leave:
        words.append("autoleave")
    return " ".join(words)


def describe_configuration(config: Configuration) -> str:
    """Return the same as ``describe_conf_state`` for the form that the core keeps."""
    return describe_conf_state(config.conf_state())


def describe_snapshot(snapshot: SnapshotMeta) -> str:
    """Return the place of a snapshot in the log, and its configuration."""
    return f"{snapshot.term}/{snapshot.index} {describe_conf_state(snapshot.conf_state)}"


def describe_hard_state(state: HardState) -> str:
    """Return term, vote and commit index."""
    vote = f" vote={state.vote}" if state.vote else ""
    return f"term={state.term}{vote} commit={state.commit}"


_VOTE_ANSWERS = frozenset((MessageType.VOTE_RESPONSE, MessageType.PRE_VOTE_RESPONSE))
_APPENDS = frozenset((MessageType.APPEND, MessageType.VOTE, MessageType.PRE_VOTE))


def describe_message(message: Message) -> str:
    """Return sender, receiver, kind, then the fields that are not zero; several entries are on lines of their own."""
    words = [f"{message.from_}->{message.to} {MessageType(message.type).name}"]
    if message.term:
        words.append(f"term={message.term}")
    # The entry before an append, or the end of a candidate's log: its term belongs to its index.
    if message.type in _APPENDS:
        words.append(f"log={message.log_term}/{message.index}")
    elif message.index:
        words.append(f"index={message.index}")
    # A refused vote tells what is committed, by index and term.
    if message.commit and message.type in _VOTE_ANSWERS:
        words.append(f"commit={message.log_term}/{message.commit}")
    elif message.commit:
        words.append(f"commit={message.commit}")
    if message.reject:
        words.append("reject")
        if message.type == MessageType.APPEND_RESPONSE:
            words.append(f"hint={message.log_term}/{message.reject_hint}")
    if message.quiet:
        words.append("quiet")
    if message.context:
        words.append(f"context={_context(message)}")
    if message.snapshot is not None:
        words.append(f"snapshot={describe_snapshot(message.snapshot)}")
    if len(message.entries) == 1:
        words.append(f"entries=[{describe_entry(message.entries[0])}]")
    elif message.entries:
        lines = [f"\n{_INDENT}{describe_entry(entry)}" for entry in message.entries]
        words.append("entries=[" + "".join(lines) + "\n]")
    return " ".join(words)


def _context(message: Message) -> str:
    # Heartbeats carry the position of the last read to confirm, everything else what the caller gave.
    if message.type in (MessageType.HEARTBEAT, MessageType.HEARTBEAT_RESPONSE):
        return f"#{int.from_bytes(message.context, 'big')}"
    return describe_data(message.context)


def describe_ready(ready: Ready) -> str:
    """Return every part of a Ready that is there, in the order of the caller's duties."""
    lines: list[str] = []
    if ready.soft_state is not None:
        lines.append(f"soft state: leader={ready.soft_state.leader} {_role(ready.soft_state.role)}")
    lines += _block("messages", [describe_message(message) for message in ready.messages])
    if ready.snapshot is not None:
        lines.append(f"snapshot: {describe_snapshot(ready.snapshot)}")
    lines += _block("entries", [describe_entry(entry) for entry in ready.entries])
    if ready.hard_state is not None:
        lines.append(f"hard state: {describe_hard_state(ready.hard_state)}")
    after = [describe_message(message) for message in ready.messages_after_append]
    lines += _block("messages after append", after)
    lines += _block("committed", [describe_entry(entry) for entry in ready.committed_entries])
    for state in ready.read_states:
        lines.append(f"read: index={state.index} context={describe_data(state.context)}")
    if not lines:
        return "empty ready\n"
    return f"ready{' sync' if ready.must_sync else ''}:\n" + "".join(f"{_INDENT}{line}\n" for line in lines)


def _block(title: str, texts: list[str]) -> list[str]:
    if not texts:
        return []
    return [f"{title}:"] + [_INDENT + line for text in texts for line in text.split("\n")]


def _role(role: StateRole) -> str:
    return role.name.lower()


def describe_progress(progress: Progress) -> str:
    """Return state, match, next, and the fields that differ from their usual values."""
    words = [f"{progress.state.value} match={progress.match} next={progress.next}"]
    if progress.is_learner:
        words.append("learner")
    if progress.is_paused():
        words.append("paused")
    if progress.pending_snapshot:
        words.append(f"pending_snapshot={progress.pending_snapshot}")
    if not progress.recent_active:
        words.append("inactive")
    if len(progress.inflights):
        full = "[full]" if progress.inflights.full() else ""
        words.append(f"inflight={len(progress.inflights)}{full}")
    return " ".join(words)


def describe_raft(raft: Raft) -> str:
    """Return one line: role, term, vote, leader, and how far the log is."""
    log = raft.log
    vote = f" vote={raft.vote}" if raft.vote else ""
    leader = f" leader={raft.leader}" if raft.leader != NONE else ""
    return (
        f"{raft.id}: {_role(raft.role)} term={raft.term}{vote}{leader} "
        f"last={log.last_term}/{log.last_index} commit={log.committed} applied={log.applied}"
    )


def describe_status(raft: Raft) -> str:
    """Return ``describe_raft``, the configuration, and on a leader the progress of each member."""
    lines = [describe_raft(raft), _INDENT + describe_configuration(raft.tracker.config)]
    if raft.role == StateRole.LEADER:
        for member, progress in raft.tracker.progress.items():
            lines.append(f"{_INDENT}{member}: {describe_progress(progress)}")
    return "\n".join(lines) + "\n"


def describe_log(raft: Raft) -> str:
    """Return every entry that can be read, the unstable ones marked: ``*`` being written, ``+`` not handed out yet."""
    log = raft.log
    first = log.first_index()
    lines = [f"log {raft.id}: first={first} last={log.last_index}"]
    if log.last_index >= first:
        for entry in log.entries(first, log.last_index + 1, 1 << 62):
            mark = ""
            if entry.index >= log.unstable.in_progress:
                mark = " +"
            elif entry.index >= log.unstable.offset:
                mark = " *"
            lines.append(f"{_INDENT}{describe_entry(entry)}{mark}")
    return "\n".join(lines) + "\n"
