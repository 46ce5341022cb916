"""Which changes would endanger the quorum: etcd's rules, with its errors."""

from __future__ import annotations

import pytest

from raftkv import errors
from raftkv.pb import rpc_pb2
from raftkv.replica.membership import changes
from raftkv.replica.membership.changes import View

NOW = 100.0
FINE, SHORT, AWAY = NOW - 6.0, NOW - 4.0, None
"""Connected for long enough, too shortly, not at all."""


def view(*connected: float | None, unstarted: int = 0, learners: int = 0) -> View:
    """Member 1 sees the others, of which some were added and never started, and some learners."""
    count = 1 + len(connected)
    members = {
        each: rpc_pb2.Member(ID=each, name="" if each > count - unstarted else f"m{each}")
        for each in range(1, count + 1)
    }
    for each in range(count + 1, count + 1 + learners):
        members[each] = rpc_pb2.Member(ID=each, name=f"m{each}", isLearner=True)
    since = dict(enumerate(connected, 2))
    return View(1, members, since.get, NOW)


ENOUGH = errors.NotEnoughStartedMembersError
HEALTHY = errors.UnhealthyError


@pytest.mark.parametrize(
    ("seen", "voter", "learner"),
    [
        (view(), None, None),
        (view(learners=3), None, None),
        (view(FINE), None, None),
        (view(FINE, FINE), None, None),
        (view(FINE, SHORT), HEALTHY, HEALTHY),
        (view(FINE, AWAY), HEALTHY, HEALTHY),
        (view(AWAY, unstarted=1), ENOUGH, HEALTHY),
        (view(FINE, AWAY, unstarted=1), ENOUGH, HEALTHY),
        (view(FINE, FINE, AWAY), None, None),
        (view(FINE, SHORT, AWAY), HEALTHY, HEALTHY),
        (view(FINE, FINE, FINE, AWAY, unstarted=1), None, None),
        (view(FINE, FINE, AWAY, AWAY, unstarted=2), ENOUGH, HEALTHY),
    ],
)
def test_add(seen: View, voter: type | None, learner: type | None) -> None:
    assert _error(lambda: changes.check_add(False, seen)) == voter
    assert _error(lambda: changes.check_add(True, seen)) == learner


@pytest.mark.parametrize(
    ("seen", "member", "expected"),
    [
        (view(), 1, ENOUGH),  # the last voter
        (view(learners=1), 1, ENOUGH),
        (view(learners=1), 2, None),
        (view(), 99, None),  # who is unknown is refused when it is applied
        (view(FINE), 2, None),
        (view(AWAY), 2, None),
        (view(AWAY), 1, HEALTHY),
        (view(AWAY, unstarted=1), 2, None),
        (view(AWAY, unstarted=1), 1, ENOUGH),
        (view(FINE, FINE), 3, None),
        (view(FINE, AWAY), 3, None),  # it is no part of the quorum that works
        (view(FINE, AWAY), 2, HEALTHY),
        (view(FINE, AWAY), 1, HEALTHY),
        (view(FINE, SHORT), 3, HEALTHY),
        (view(FINE, FINE, AWAY, AWAY), 2, HEALTHY),
    ],
)
def test_remove(seen: View, member: int, expected: type | None) -> None:
    assert _error(lambda: changes.check_remove(member, seen)) == expected


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (view(learners=1), None),
        (view(FINE, learners=1), None),
        (view(AWAY, unstarted=1, learners=1), None),
        (view(AWAY, AWAY, unstarted=2, learners=1), ENOUGH),
    ],
)
def test_promote(seen: View, expected: type | None) -> None:
    assert _error(lambda: changes.check_promote(seen)) == expected


@pytest.mark.parametrize(
    ("match", "leader", "connected", "expected"),
    [
        (90, 100, True, None),
        (89, 100, True, errors.LearnerNotReadyError),
        (100, 100, False, errors.LearnerNotReadyError),
        (0, 5, True, errors.LearnerNotReadyError),
        (9, 10, True, None),
    ],
)
def test_in_sync(match: int, leader: int, connected: bool, expected: type | None) -> None:
    assert _error(lambda: changes.check_in_sync(match, leader, connected)) == expected


def _error(check: object) -> type | None:
    assert callable(check)
    try:
        check()
    except errors.StatusError as error:
        return type(error)
    return None
