"""Arithmetic on sets of voters: what a majority has acknowledged, and how an election stands.

A configuration is one set of voters or, during joint consensus, two (``incoming`` and ``outgoing``); then every
decision needs a majority of *each* (thesis section 4.3). An empty set decides nothing against anyone: its committed
index is infinite and its elections are won, so that a joint decision with one empty half is that of the other half.

Example: voters {1, 2, 3} that acknowledged 9, 7 and 4 have committed 7, because two of three hold it.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping

INDEX_INFINITE = (1 << 64) - 1
"""Committed index of the empty set of voters."""


class VoteResult(enum.Enum):
    """The state of an election."""

    PENDING = "pending"
    LOST = "lost"
    WON = "won"


def committed_of(acked: list[int]) -> int:
    """Return the largest index that a majority has reached, given one index per voter. Sorts ``acked`` in place.

    This is the hot form: the leader calls it for each acknowledgement with the match indexes of the voters.
    """
    if not acked:
        return INDEX_INFINITE
    acked.sort()
    # The median from below: of 3 the 2nd, of 4 the 2nd, of 5 the 3rd. So many or more are at or above it.
    return acked[(len(acked) - 1) // 2]


def committed_index(voters: Collection[int], acked: Mapping[int, int]) -> int:
    """Return the largest index that a majority acknowledged.

    Arguments:
        voters: their ids; of no voters every index is committed.
        acked: index of each voter; a voter that is missing counts as 0.
    """
    return committed_of([acked.get(voter, 0) for voter in voters])


def joint_committed_index(incoming: Collection[int], outgoing: Collection[int], acked: Mapping[int, int]) -> int:
    """Return the largest index that both halves of a joint configuration have committed.

    Arguments:
        incoming, outgoing: ids of the voters of each half; the outgoing one is empty unless the configuration is joint.
        acked: index of each voter.
    """
    return min(committed_index(incoming, acked), committed_index(outgoing, acked))


def vote_result(voters: Collection[int], votes: Mapping[int, bool]) -> VoteResult:
    """Return the state of an election.

    Arguments:
        voters: their ids; an election among no voters is won.
        votes: True for yes, False for no; a voter that is missing was not heard from.
    """
    if not voters:
        return VoteResult.WON
    needed = len(voters) // 2 + 1
    granted = sum(1 for voter in voters if votes.get(voter) is True)
    silent = sum(1 for voter in voters if voter not in votes)
    if granted >= needed:
        return VoteResult.WON
    return VoteResult.PENDING if granted + silent >= needed else VoteResult.LOST


def joint_vote_result(incoming: Collection[int], outgoing: Collection[int], votes: Mapping[int, bool]) -> VoteResult:
    """Return the state of an election in a joint configuration: both halves must be won, one lost half loses it.

    Arguments:
        incoming, outgoing: ids of the voters of each half; the outgoing one is empty unless the configuration is joint.
        votes: as of ``vote_result``.
    """
    results = (vote_result(incoming, votes), vote_result(outgoing, votes))
    if VoteResult.LOST in results:
        return VoteResult.LOST
    return VoteResult.PENDING if VoteResult.PENDING in results else VoteResult.WON


def describe(voters: Collection[int], acked: Mapping[int, int]) -> str:
    """Return a small bar chart of who acknowledged what, one voter a line, in order of id.

    The bar of a voter is as long as the number of voters strictly behind it; ``?`` marks one that said nothing::

        1: xx>  9
        2: x>   7
        3: >    4

    Arguments:
        voters: their ids.
        acked: index of each voter.
    """
    if not voters:
        return "<empty majority quorum>\n"
    lines = []
    for voter in sorted(voters):
        index = acked.get(voter)
        if index is None:
            lines.append(f"{voter}: ?{' ' * len(voters)} 0")
            continue
        behind = sum(1 for other in voters if acked.get(other, 0) < index)
        lines.append(f"{voter}: {'x' * behind}>{' ' * (len(voters) - behind)} {index}")
    return "\n".join(lines) + "\n"
