"""The members as a leader sees them: the configuration, the record of each member, and the votes of an election.

Invariant: exactly the members of the configuration have a ``Progress``, and its ``is_learner`` says what the
configuration says. ``switch`` keeps it; nothing else changes either.

The lists ``peers``, ``incoming`` and ``outgoing`` exist because the hot path walks them for every message; they are
rebuilt only when the configuration changes, in order of id, so that equal inputs give equal outputs.
"""

from __future__ import annotations

from . import quorum
from .confchange import Configuration
from .progress import Inflights, Progress


class Tracker:
    """The configuration of one Raft group at one member, with the progress and the votes of its members."""

    __slots__ = (
        "config",
        "id",
        "incoming",
        "max_inflight_bytes",
        "max_inflight_messages",
        "outgoing",
        "peers",
        "progress",
        "votes",
    )

    def __init__(self, id: int, max_inflight_messages: int, max_inflight_bytes: int) -> None:
        self.id = id
        self.max_inflight_messages = max_inflight_messages
        self.max_inflight_bytes = max_inflight_bytes
        self.config = Configuration()
        self.progress: dict[int, Progress] = {}
        # Everybody but this member: who is sent appends and heartbeats.
        self.peers: list[tuple[int, Progress]] = []
        self.incoming: list[Progress] = []
        self.outgoing: list[Progress] = []
        self.votes: dict[int, bool] = {}

    def switch(self, config: Configuration, last_index: int) -> None:
        """Take over a configuration: forget who left, begin a record of who is new, keep the others.

        Arguments:
            config: the configuration.
            last_index: the end of this member's log, where the first probe of a new member begins.
        """
        progress = {}
        for member in sorted(config.members()):
            known = self.progress.get(member)
            if known is None:
                known = self._new_progress(last_index)
            known.is_learner = member in config.learners
            progress[member] = known
        self.config = config
        self.progress = progress
        self.peers = [(member, each) for member, each in progress.items() if member != self.id]
        self.incoming = [progress[voter] for voter in config.voters]
        self.outgoing = [progress[voter] for voter in config.outgoing]

    def _new_progress(self, last_index: int) -> Progress:
        # First probe at the end of our log: a member that starts empty answers with a hint or needs a snapshot.
        inflights = Inflights(self.max_inflight_messages, self.max_inflight_bytes)
        progress = Progress(max(last_index, 1), inflights)
        # Counts as heard from, or the quorum check could depose us before it had a chance to answer.
        progress.recent_active = True
        return progress

    def reset(self, last_index: int) -> None:
        """Forget what was known of the members' logs and votes: a new term begins."""
        self.votes = {}
        for member, progress in self.progress.items():
            progress.reset(last_index + 1, last_index if member == self.id else 0)

    def committed(self) -> int:
        """Return the largest index that a quorum has acknowledged."""
        index = quorum.committed_of([progress.match for progress in self.incoming])
        if self.outgoing:
            return min(index, quorum.committed_of([progress.match for progress in self.outgoing]))
        return index

    def quorum_active(self) -> bool:
        """Return whether a quorum was heard from since the last check."""
        config = self.config
        active = {member: progress.recent_active for member, progress in self.progress.items()}
        result = quorum.joint_vote_result(config.voters, config.outgoing, active)
        return result is quorum.VoteResult.WON

    def record_vote(self, id: int, granted: bool) -> None:
        """Count a vote; the first one of a voter stands.

        Arguments:
            id: of the voter.
            granted: whether it said yes.
        """
        self.votes.setdefault(id, granted)

    def vote_result(self) -> quorum.VoteResult:
        """Return the state of the running election."""
        return quorum.joint_vote_result(self.config.voters, self.config.outgoing, self.votes)

    def is_sole_voter(self) -> bool:
        """Return whether this member alone decides."""
        return len(self.config.voters) == 1 and not self.config.outgoing and self.id in self.config.voters
