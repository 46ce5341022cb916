"""What hashes of several members say about each other. Pure: the rules are etcd's (server/etcdserver/corrupt.go).

    at_start       own hash against each other member's      different: this member must not serve
    while_running  the leader's, before and after a read      followers whose history cannot be part of the leader's
                   that a quorum confirmed
    of_compaction  all members' at one compacted revision     who is not with the majority; id 0 if there is none

Two hashes can be compared only if they are of one revision with one compact revision. What cannot be compared (no
answer, compacted since, not yet there, another compact revision) makes the result UNKNOWN, never EQUAL.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

NOBODY = 0
"""Member id of an alarm that is about the cluster: nobody knows who is wrong."""


class Result(enum.Enum):
    """What a comparison came to."""

    EQUAL = "equal"
    DIFFERENT = "different"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Hash:
    """A member's hash of its history up to a revision."""

    hash: int
    compact_revision: int
    revision: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What another member answered.

    Attributes:
        member_id: who.
        hash: its hash; None if it gave none.
        present: its revision when it answered.
        failure: why it gave none.
    """

    member_id: int
    hash: Hash | None
    present: int = 0
    failure: str = ""


@dataclass(slots=True)
class Finding:
    """The result of a comparison.

    Attributes:
        suspects: members that an alarm is about.
        reasons: a line for everything that is not as it should be.
        compared: members whose hashes could be compared.
    """

    suspects: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    compared: int = 0
    is_complete: bool = True

    @property
    def result(self) -> Result:
        """What it came to. One difference is enough; equality needs all."""
        if self.suspects:
            return Result.DIFFERENT
        return Result.EQUAL if self.is_complete else Result.UNKNOWN

    def unknown(self, member_id: int, why: str) -> None:
        """Note that a member could not be compared."""
        self.is_complete = False
        self.reasons.append(f"member {member_id:x} could not be compared: {why}")

    def suspect(self, member_id: int, why: str) -> None:
        """Note that a member's data are wrong, or may be."""
        if member_id not in self.suspects:
            self.suspects.append(member_id)
        self.reasons.append(f"member {member_id:x}: {why}")


def _of(answer: Answer) -> str:
    return f"hash {answer.hash.hash:08x} at revision {answer.hash.revision}" if answer.hash else answer.failure


def at_start(me: int, mine: Hash, answers: Sequence[Answer]) -> Finding:
    """Compare this member with the others before it serves.

    Arguments:
        me: id of this member.
        mine: its hash.
        answers: of the others, at the same revision.
    """
    finding = Finding()
    for answer in answers:
        found = answer.hash
        if found is None or found.revision != mine.revision:
            finding.unknown(answer.member_id, answer.failure or f"it hashed revision {found.revision if found else 0}")
        elif found.compact_revision != mine.compact_revision:
            finding.unknown(answer.member_id, f"it is compacted to {found.compact_revision}")
        else:
            finding.compared += 1
            if found.hash != mine.hash:
                finding.suspect(me, f"hash {mine.hash:08x}, but member {answer.member_id:x} has {_of(answer)}")
    return finding


def while_running(me: int, before: Hash, after: Hash, present: int, answers: Sequence[Answer]) -> Finding:
    """Compare the followers with the leader.

    Arguments:
        me: id of this member, which leads.
        before: its hash, of the revision that the followers were asked for.
        after: its hash of the present, made when a quorum had confirmed a read after their answers.
        present: its revision then.
        answers: of the followers.
    """
    finding = Finding()
    if (after.revision, after.compact_revision) == (before.revision, before.compact_revision) and after != before:
        finding.suspect(me, f"two hashes of revision {after.revision}: {before.hash:08x} and {after.hash:08x}")
    for answer in answers:
        found = answer.hash
        if answer.present > present:
            finding.suspect(answer.member_id, f"revision {answer.present}, above the leader's {present}")
        elif found is None or found.revision != before.revision:
            finding.unknown(answer.member_id, answer.failure or f"it hashed revision {found.revision if found else 0}")
        elif found.compact_revision > after.compact_revision:
            why = f"compacted to {found.compact_revision}, above the leader's {after.compact_revision}"
            finding.suspect(answer.member_id, why)
        elif found.compact_revision != before.compact_revision:
            finding.unknown(answer.member_id, f"it is compacted to {found.compact_revision}")
        else:
            finding.compared += 1
            if found.hash != before.hash:
                finding.suspect(answer.member_id, f"{_of(answer)}, the leader has {before.hash:08x}")
    return finding


def of_compaction(me: int, mine: Hash, answers: Sequence[Answer]) -> Finding:
    """Compare all members at a compacted revision: the majority is right.

    Arguments:
        me: id of this member, which leads.
        mine: its hash.
        answers: of the others.
    """
    finding, groups = Finding(), {mine.hash: [me]}
    for answer in answers:
        found = answer.hash
        if found is None:
            finding.unknown(answer.member_id, answer.failure)
        elif (found.revision, found.compact_revision) != (mine.revision, mine.compact_revision):
            finding.unknown(answer.member_id, f"revision {found.revision}, compacted to {found.compact_revision}")
        else:
            finding.compared += 1
            groups.setdefault(found.hash, []).append(answer.member_id)
    if len(groups) == 1:
        return finding
    quorum = (len(answers) + 1) // 2 + 1
    majority = next((hash_ for hash_, members in groups.items() if len(members) >= quorum), None)
    if majority is None:
        told = "; ".join(f"{hash_:08x}: " + ", ".join(f"{one:x}" for one in ids) for hash_, ids in groups.items())
        finding.suspect(NOBODY, f"no hash of revision {mine.revision} has a majority ({told})")
        return finding
    for hash_, members in groups.items():
        for member_id in members if hash_ != majority else ():
            why = f"hash {hash_:08x} at compacted revision {mine.revision}, most members have {majority:08x}"
            finding.suspect(member_id, why)
    return finding
