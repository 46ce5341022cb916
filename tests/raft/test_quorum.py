"""Quorum arithmetic against models that try every subset."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from raftkv.raft import tracker
from raftkv.raft.tracker import INDEX_INFINITE, VoteResult

ids = st.integers(1, 7)
voter_sets = st.sets(ids, max_size=7)
acknowledged = st.dictionaries(ids, st.integers(0, 9))
vote_maps = st.dictionaries(ids, st.booleans())


def _majorities(voters: set[int]) -> list[set[int]]:
    return [set(each) for n in range(len(voters) // 2 + 1, len(voters) + 1) for each in combinations(voters, n)]


def _committed(voters: set[int], acked: dict[int, int]) -> int:
    if not voters:
        return INDEX_INFINITE
    return max(min(acked.get(voter, 0) for voter in majority) for majority in _majorities(voters))


def _result(voters: set[int], votes: dict[int, bool]) -> VoteResult:
    if not voters or any(all(votes.get(voter) for voter in majority) for majority in _majorities(voters)):
        return VoteResult.WON
    open_to_win = any(all(votes.get(voter, True) for voter in majority) for majority in _majorities(voters))
    return VoteResult.PENDING if open_to_win else VoteResult.LOST


@given(voter_sets, acknowledged)
def test_committed_index_is_held_by_some_majority(voters: set[int], acked: dict[int, int]) -> None:
    assert tracker.committed_index(voters, acked) == _committed(voters, acked)
    assert tracker.committed_of([acked.get(voter, 0) for voter in voters]) == _committed(voters, acked)


@given(voter_sets, voter_sets, acknowledged)
def test_joint_committed_index_is_held_by_majorities_of_both(incoming, outgoing, acked):
    expected = min(_committed(incoming, acked), _committed(outgoing, acked))
    assert tracker.joint_committed_index(incoming, outgoing, acked) == expected


@given(voter_sets, vote_maps)
def test_vote_result(voters: set[int], votes: dict[int, bool]) -> None:
    assert tracker.vote_result(voters, votes) is _result(voters, votes)


@given(voter_sets, voter_sets, vote_maps)
def test_joint_vote_needs_both_halves(incoming: set[int], outgoing: set[int], votes: dict[int, bool]) -> None:
    halves = {_result(incoming, votes), _result(outgoing, votes)}
    result = tracker.joint_vote_result(incoming, outgoing, votes)
    if VoteResult.LOST in halves:
        assert result is VoteResult.LOST
    else:
        assert result is (VoteResult.WON if halves == {VoteResult.WON} else VoteResult.PENDING)


def test_describe_draws_relative_progress() -> None:
    assert tracker.describe({1, 2, 3}, {1: 9, 2: 7, 3: 4}) == "1: xx>  9\n2: x>   7\n3: >    4\n"
    assert tracker.describe({1, 2}, {2: 3}) == "1: ?   0\n2: x>  3\n"
    assert tracker.describe(set(), {}) == "<empty majority quorum>\n"
