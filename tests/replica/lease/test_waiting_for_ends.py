"""Keep-alives that wait for the end of a lease: of a live owner, and very many for one lease."""

from __future__ import annotations

import asyncio

import pytest

from raftkv.apply.wire import Kind
from raftkv.replica.lease import lessor as lessor_module
from raftkv.replica.lease.renewals import RENEW_MAX
from raftkv.replica.lease.times import PATIENCE_S
from tests.replica.lease import test_on_leader
from tests.replica.lease.test_on_leader import Asked, Follower

follower, run_async = test_on_leader.follower, test_on_leader.run_async
pytestmark = pytest.mark.interpreted  # the lessor gets a stand-in for its node


async def test_a_keep_alive_that_waited_for_a_quorum_renews_a_lease_that_was_given_time(follower, monkeypatch):
    """Renew a lease whose keep-alive came before its end and its quorum later: its owner was told that it is gone."""
    monkeypatch.setattr(lessor_module, "QUORUM_LATE_S", -1.0)
    node, lessor = follower.node, follower.lessor
    await follower.lead_and_lose_an_owner(7)
    lessor._on_leader.leader_changed()  # the confirmation of a moment ago counts no more
    (asked,) = await follower.ask(7)
    node.asked.clear()
    await follower.wait_read()  # of the leader that wants to end it
    assert await follower.confirm() == 2
    assert [kind for kind, _ in node.proposed] == [Kind.LEASE_RENEW]
    node.finish()
    assert asked.told == [60]
    assert lessor.times.remaining_s(7) > PATIENCE_S


async def test_a_turn_answers_some_of_very_many_keep_alives_of_a_lease_that_has_ended(follower: Follower) -> None:
    lessor = follower.lessor
    lessor.times.granted(7, 60)
    waiting = [Asked(7) for _ in range(2 * RENEW_MAX + 1)]
    lessor._renewals._expiring[7] = [*waiting]
    lessor.times.ended(7, expired=True)
    answered = []
    while not waiting[-1].told:
        before = sum(bool(one.told) for one in waiting)
        lessor.applied() if not before else await asyncio.sleep(0)
        answered.append(sum(bool(one.told) for one in waiting) - before)
    assert max(answered) <= RENEW_MAX
    assert all(one.told == [0] for one in waiting)
