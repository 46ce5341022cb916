"""Rules over all members of a cluster, fed after every step (reliability.md section 4: R1, R2, R3, R4, R9)."""

from __future__ import annotations

from collections.abc import Iterable

from raftkv.raft.core import Raft
from raftkv.raft.errors import InvariantError
from raftkv.raft.types import Entry, StateRole


class ClusterChecks:
    """Remembers the leader of each term and the committed entry at each index."""

    def __init__(self) -> None:
        self.leaders: dict[int, int] = {}
        # Entry committed at each index, as the first member to say so holds it.
        self.committed: dict[int, Entry] = {}
        self._checked: dict[int, int] = {}

    def check(self, rafts: Iterable[Raft]) -> None:
        """Raise ``InvariantError`` when the members together break a rule."""
        rafts = list(rafts)
        for raft in rafts:
            self._check_election_safety(raft)
        for raft in rafts:
            self._check_committed(raft)
        for raft in rafts:
            if raft.role == StateRole.LEADER:
                self._check_leader_completeness(raft)
        self._check_log_matching(rafts)

    def forget(self, id: int) -> None:
        """The member restarted: look at its whole log again."""
        self._checked.pop(id, None)

    def _check_election_safety(self, raft: Raft) -> None:
        # R1: at most one leader can be elected in a term.
        if raft.role == StateRole.LEADER and self.leaders.setdefault(raft.term, raft.id) != raft.id:
            raise InvariantError(f"{raft.id} and {self.leaders[raft.term]} lead term {raft.term}")

    def _check_committed(self, raft: Raft) -> None:
        # R4: what one member takes for committed at an index, every member does.
        log = raft.log
        low = max(self._checked.get(raft.id, 0) + 1, log.first_index())
        if low <= log.committed:
            for entry in log.entries(low, log.committed + 1, 1 << 62):
                known = self.committed.setdefault(entry.index, entry)
                if known != entry:
                    raise InvariantError(f"{raft.id} committed {entry!r}, another one {known!r}")
            self._checked[raft.id] = log.committed

    def _check_leader_completeness(self, raft: Raft) -> None:
        # R3: a committed entry is in the log of every leader of a later term. The commit of its own term or an
        # earlier one must be in the log of a leader that is not deposed: only the newest leader is held to it.
        if raft.term < max(self.leaders):
            return
        log = raft.log
        for index, entry in self.committed.items():
            if index >= log.first_index() and (index > log.last_index or log.term(index) != entry.term):
                raise InvariantError(f"leader {raft.id} of term {raft.term} lacks committed {entry!r}")

    @staticmethod
    def _check_log_matching(rafts: list[Raft]) -> None:
        # R2: if two logs have an entry with the same index and term, they are equal up to there. Terms compared
        # downwards: behind the first match, everything must match.
        for at, one in enumerate(rafts):
            for other in rafts[at + 1 :]:
                matched = False
                last = min(one.log.last_index, other.log.last_index)
                first = max(one.log.first_index(), other.log.first_index())
                for index in range(last, first - 1, -1):
                    same = one.log.term(index) == other.log.term(index)
                    if matched and not same:
                        raise InvariantError(f"logs of {one.id} and {other.id} match behind {index}, but not there")
                    matched = same
