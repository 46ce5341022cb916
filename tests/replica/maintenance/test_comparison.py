"""Comparison of members' hashes by the rules of etcd's corrupt.go, one per row; an unknown hash is never equal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv.replica.maintenance.hashes import Answer, Finding, Hash, Result, at_start, of_compaction, while_running

MINE = Hash(7, 3, 10)
AWAY = Answer(2, None, failure="it is not connected")


def answer(member_id: int, hash_: int = 7, compacted: int = 3, revision: int = 10, present: int = 10) -> Answer:
    return Answer(member_id, Hash(hash_, compacted, revision), present)


def told(finding: Finding) -> tuple[str, list[int]]:
    return finding.result.value, finding.suspects


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([], ("equal", [])),
        ([answer(2), answer(3)], ("equal", [])),
        ([answer(2), AWAY], ("unknown", [])),
        ([answer(2, compacted=5, hash_=8)], ("unknown", [])),
        ([answer(2, revision=9)], ("unknown", [])),
        ([answer(2, hash_=8), answer(3)], ("different", [2])),
        ([answer(2, hash_=8), answer(3, hash_=8)], ("different", [1])),
        ([answer(2, hash_=8), answer(3, hash_=9)], ("different", [1])),
        ([answer(2, hash_=8), AWAY], ("different", [1])),
        ([answer(2, hash_=8)], ("different", [1])),
        ([answer(2, hash_=8), answer(3, hash_=9), answer(4), answer(5)], ("different", [2, 3])),
    ],
)
def test_at_start_a_member_that_differs_serves_only_if_most_agree_with_it(answers, expected):
    """One member with a damaged disk kept every healthy one from starting, and had it throw its data away."""
    assert told(at_start(1, MINE, answers)) == expected


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([answer(2), answer(3, present=12)], ("equal", [])),
        ([answer(2), AWAY], ("unknown", [])),
        ([answer(2, hash_=8), answer(3)], ("different", [2])),
        ([answer(2, hash_=8), answer(3, hash_=8)], ("different", [1])),
        ([answer(2, hash_=8), answer(3, hash_=8), answer(4), answer(5, hash_=8)], ("different", [1])),
        ([answer(2, hash_=8), answer(3, hash_=9)], ("different", [2, 3])),
        ([answer(2, hash_=8), answer(3, hash_=8), answer(4, hash_=9), answer(5)], ("different", [2, 3, 4])),
        ([answer(2, present=21), answer(3, hash_=9)], ("different", [2, 3])),
        ([answer(2, compacted=6)], ("different", [2])),
        ([answer(2, compacted=5, hash_=9)], ("unknown", [])),
        ([answer(2, compacted=2, hash_=9)], ("unknown", [])),
    ],
)
def test_while_running(answers: list[Answer], expected: tuple[str, list[int]]) -> None:
    """The leader is compacted from 3 to 5 and has come from revision 10 to 20 meanwhile."""
    assert told(while_running(1, MINE, Hash(1, 5, 20), 20, answers)) == expected


def test_a_leader_that_hashes_one_revision_twice_and_differs_suspects_itself() -> None:
    assert told(while_running(1, MINE, Hash(8, 3, 10), 10, [])) == ("different", [1])


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([], ("equal", [])),
        ([answer(2), answer(3)], ("equal", [])),
        ([answer(2), AWAY], ("unknown", [])),
        ([answer(2), answer(3, compacted=10)], ("unknown", [])),
        ([answer(2), answer(3, hash_=8)], ("different", [3])),
        ([answer(2, hash_=8), answer(3, hash_=8)], ("different", [1])),
        ([answer(2, hash_=8)], ("different", [0])),
        ([answer(2, hash_=8), answer(3, hash_=9)], ("different", [0])),
        ([answer(2, hash_=8), AWAY], ("different", [0])),
        ([answer(2), answer(3), answer(4, hash_=8), answer(5, hash_=9)], ("different", [4, 5])),
    ],
)
def test_compaction_findings(answers: list[Answer], expected: tuple[str, list[int]]) -> None:
    assert told(of_compaction(1, MINE, answers)) == expected


hashes = st.builds(Hash, st.integers(0, 2), st.integers(2, 4), st.integers(9, 11))
an_answer = st.builds(Answer, st.integers(2, 6), st.none() | hashes, st.integers(9, 12), st.just("why"))


@given(hashes, st.lists(an_answer, max_size=4))
def test_equal_requires_same_answer_of_all_members(mine: Hash, answers: list[Answer]) -> None:
    running = while_running(1, mine, mine, 12, answers)
    for finding in (at_start(1, mine, answers), of_compaction(1, mine, answers), running):
        if finding.result is Result.EQUAL:
            assert all(one.hash == mine for one in answers)
            assert finding.compared == len(answers)
        else:
            assert finding.reasons
