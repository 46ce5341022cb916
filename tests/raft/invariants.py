"""Rules that must hold in one member at any moment (basic), and between two moments of its life (delta).

In the manner of LogCabin's invariant checks: the tests of the core and the simulator call them after every step. They
only read. A broken rule raises ``InvariantError``.

Rules that need the view of all members (one leader a term, matching logs, equal applied entries) are in
``cluster_checks.py``. A bug is not the only way to break a rule here: a disk that loses synced writes breaks them too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from raftkv.raft import confchange
from raftkv.raft.core import Raft
from raftkv.raft.errors import ConfChangeError, InvariantError
from raftkv.raft.log import RaftLog
from raftkv.raft.tracker import SNAPSHOT, Progress
from raftkv.raft.types import NONE, StateRole


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of a member before a step, for the delta rules; ``observe`` takes it."""

    id: int
    term: int
    vote: int
    role: StateRole
    leader: int
    committed: int
    committed_term: int
    applied: int
    applying: int
    last_index: int
    last_term: int


def observe(raft: Raft) -> Checkpoint:
    """Return the state of a member for a later ``check_delta``."""
    log = raft.log
    return Checkpoint(
        id=raft.id,
        term=raft.term,
        vote=raft.vote,
        role=raft.role,
        leader=raft.leader,
        committed=log.committed,
        committed_term=log.term_or_zero(log.committed),
        applied=log.applied,
        applying=log.applying,
        last_index=log.last_index,
        last_term=log.last_term,
    )


def check_basic(raft: Raft) -> None:
    """Check that the state of a member does not contradict itself.

    Raises:
        InvariantError: the state is inconsistent.
    """
    for broken in _broken_basic(raft):
        raise InvariantError(f"member {raft.id}, term {raft.term}: {broken}")


def check_delta(before: Checkpoint, raft: Raft) -> None:
    """Check that a member may have moved from an earlier state to its present one.

    Both must be of one life of the member, without a restart in between (for that see ``check_restart``).

    Arguments:
        before: the earlier state.
        raft: the member.

    Raises:
        InvariantError: it may not.
    """
    for broken in _broken_delta(before, raft):
        raise InvariantError(f"member {raft.id}, term {before.term} -> {raft.term}: {broken}")


def check_restart(persisted: Checkpoint, raft: Raft) -> None:
    """Check that a restarted member still has its durable term and vote.

    Arguments:
        persisted: hard state that was durable before.
        raft: the member after its restart.

    Raises:
        InvariantError: the term or the vote is lost.
    """
    if raft.term < persisted.term:
        raise InvariantError(f"member {raft.id} forgot term {persisted.term}")
    if raft.term == persisted.term and persisted.vote not in (NONE, raft.vote):
        raise InvariantError(f"member {raft.id} forgot its vote for {persisted.vote} in term {raft.term}")


class Checker:
    """A check of both kinds of rule for one member: call ``check`` after every step.

    ::

        checker = Checker(node.raft)
        node.step(message)
        checker.check()
    """

    def __init__(self, raft: Raft) -> None:
        self._raft = raft
        self._before = observe(raft)
        check_basic(raft)

    def check(self) -> None:
        """Check both kinds of rule since the last call.

        Raises:
            InvariantError: a rule is broken now, or was on the way.
        """
        check_basic(self._raft)
        check_delta(self._before, self._raft)
        self._before = observe(self._raft)


def _broken_basic(raft: Raft) -> Iterator[str]:
    yield from _broken_log(raft.log, raft.term)
    yield from _broken_role(raft)
    try:
        confchange.check(raft.tracker.config)
    except ConfChangeError as error:
        yield f"configuration: {error}"
    if set(raft.tracker.progress) != set(raft.tracker.config.members()):
        yield "progress is not kept of exactly the members"
    for member, progress in raft.tracker.progress.items():
        if progress.is_learner != (member in raft.tracker.config.learners):
            yield f"{member} is learner in the progress or in the configuration, not in both"
        if raft.role == StateRole.LEADER:
            for broken in _broken_progress(raft, progress):
                yield f"progress of {member}: {broken}"


def _broken_log(log: RaftLog, term: int) -> Iterator[str]:
    if not log.applied <= log.applying <= log.committed <= log.last_index:
        yield f"applied {log.applied}, applying {log.applying}, committed {log.committed}, last {log.last_index}"
    unstable = log.unstable
    end = unstable.offset + len(unstable.entries)
    if not unstable.offset <= unstable.in_progress <= end:
        yield f"unstable from {unstable.offset} to {end}, in progress to {unstable.in_progress}"
    if end != log.last_index + 1:
        yield f"last index {log.last_index}, but the unstable tail ends before {end}"
    if log.last_term > term:
        yield f"last entry has term {log.last_term}"
    previous = log.term_or_zero(unstable.offset - 1)
    for index, entry in enumerate(unstable.entries, unstable.offset):
        if entry.index != index:
            yield f"unstable entry at {index} says it is {entry.index}"
        if entry.term < previous:
            yield f"term falls from {previous} to {entry.term} at {index}"
        previous = entry.term
    if unstable.entries and previous != log.last_term:
        yield f"last term {log.last_term}, but the last entry has {previous}"
    if unstable.snapshot is not None and unstable.snapshot.index > log.committed:
        yield f"snapshot at {unstable.snapshot.index} beyond commit {log.committed}"


def _broken_role(raft: Raft) -> Iterator[str]:
    role = raft.role
    if (role == StateRole.LEADER) != (raft.leader == raft.id):
        yield f"{role.name} with leader {raft.leader}"
    if role in (StateRole.CANDIDATE, StateRole.PRE_CANDIDATE) and raft.leader != NONE:
        yield f"{role.name} knows leader {raft.leader}"
    if role in (StateRole.CANDIDATE, StateRole.LEADER) and raft.vote != raft.id:
        yield f"{role.name} voted for {raft.vote}"
    if role == StateRole.LEADER:
        if not 0 < raft.term_start_index <= raft.log.last_index:
            yield f"leads from {raft.term_start_index}, log ends at {raft.log.last_index}"
        elif raft.log.term_or_zero(raft.term_start_index) not in (0, raft.term):
            yield f"entry {raft.term_start_index} is not of the own term"
        if raft.log.last_term != raft.term:
            yield f"leader's last entry has term {raft.log.last_term}"
    elif raft.append_due or raft.heartbeat_due or raft.transferee != NONE or len(raft.reads) or raft.reads.deferred:
        yield f"{role.name} has a leader's business"
    if raft.uncommitted_bytes < 0:
        yield f"uncommitted size {raft.uncommitted_bytes}"


def _broken_progress(raft: Raft, progress: Progress) -> Iterator[str]:
    if not 0 <= progress.match < progress.next:
        yield f"match {progress.match}, next {progress.next}"
    if progress.match > raft.log.last_index or progress.next > raft.log.last_index + 1:
        yield f"match {progress.match}, next {progress.next}, but the log ends at {raft.log.last_index}"
    if progress.state is SNAPSHOT and progress.next <= progress.pending_snapshot:
        yield f"snapshot at {progress.pending_snapshot} pending, next {progress.next}"
    if progress.state is not SNAPSHOT and progress.pending_snapshot:
        yield f"pending snapshot in state {progress.state.value}"
    window = progress.inflights.indexes()
    if window != sorted(set(window)):
        yield f"window does not ascend: {window}"
    if len(window) > progress.inflights.max_count:
        yield f"{len(window)} messages in a window of {progress.inflights.max_count}"
    if window and (window[0] <= progress.match or window[-1] >= progress.next):
        yield f"window {window} is outside match {progress.match}, next {progress.next}"


def _broken_delta(before: Checkpoint, raft: Raft) -> Iterator[str]:
    log = raft.log
    if before.id != raft.id:
        yield f"member {before.id} became {raft.id}"
    if raft.term < before.term:
        yield "term fell"
    for name, old, new in (
        ("committed", before.committed, log.committed),
        ("applied", before.applied, log.applied),
        ("applying", before.applying, log.applying),
    ):
        if new < old:
            yield f"{name} fell from {old} to {new}"
    # A committed entry stays: its term can only become unknown (by compaction).
    if log.term_or_zero(before.committed) not in (0, before.committed_term):
        yield f"committed entry {before.committed} changed its term"
    if raft.term == before.term:
        yield from _broken_within_term(before, raft)


def _broken_within_term(before: Checkpoint, raft: Raft) -> Iterator[str]:
    # A vote, once given, stands for the term (election safety).
    if before.vote not in (NONE, raft.vote):
        yield f"vote changed from {before.vote} to {raft.vote}"
    # A term has one leader; it may only become unknown.
    if NONE not in (before.leader, raft.leader) and before.leader != raft.leader:
        yield f"leader changed from {before.leader} to {raft.leader}"
    # A leader may step down within its term, and then ask for pre-votes; a campaign begins a new term.
    if before.role == StateRole.LEADER and raft.role == StateRole.CANDIDATE:
        yield "leader became candidate"
    # A leader never overwrites or deletes entries in its log, it only appends (leader append-only).
    if before.role == StateRole.LEADER and raft.role == StateRole.LEADER:
        if raft.log.last_index < before.last_index:
            yield f"leader's log shrank from {before.last_index} to {raft.log.last_index}"
        elif raft.log.term_or_zero(before.last_index) not in (0, before.last_term):
            yield f"leader's entry {before.last_index} changed its term"
