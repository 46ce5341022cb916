"""Leases on random schedules with changing leaders: never early, never revived, at most a second late (L1 to L6)."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from raftkv.replica.lease.renewals import PendingKeepAlive
from raftkv.replica.lease.times import LOGGED_S, OUTAGE_GRACE_S
from tests.replica.lease.lessor_world import Member, World

LATE_MAX_S = 1.0
SHORT_S = st.sampled_from([0.01, 0.05, 0.1, 0.3])
LONG_S = st.sampled_from([0.5, 0.9, 1.0, 1.5, 2.4, 10.0])


class LessorMachine(RuleBasedStateMachine):
    """Random histories of three members."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(3)
        # Keep-alives whose leader was confirmed and which the leader has not looked at since.
        self.confirmed: list[tuple[Member, int, PendingKeepAlive]] = []
        self.next_id = 1

    @initialize()
    def first_leader(self) -> None:
        self.world.elect(0)

    @rule(ttl_s=st.integers(1, 3))
    def grant(self, ttl_s: int) -> None:
        self.world.grant(self.next_id, ttl_s)
        self.next_id += 1

    @precondition(lambda self: self.next_id > 1)
    @rule(data=st.data(), ttl_s=st.integers(1, 3))
    def revoke_and_grant(self, data: st.DataObject, ttl_s: int) -> None:
        self.world.revoke_and_grant(data.draw(st.integers(1, self.next_id - 1)), ttl_s)

    @rule(data=st.data(), at_once=st.booleans())
    def keep_alive(self, data: st.DataObject, at_once: bool) -> None:
        world = self.world
        lease_id = data.draw(st.integers(1, self.next_id))
        asked = world.keep_alive(lease_id)
        if world.leader is not None:
            if at_once:
                world.serve(world.leader, len(world.log), asked)
            else:
                self.confirmed.append((world.leader, len(world.log), asked))

    @precondition(lambda self: self.confirmed)
    @rule(data=st.data())
    def serve_confirmed(self, data: st.DataObject) -> None:
        member, index, asked = self.confirmed.pop(data.draw(st.integers(0, len(self.confirmed) - 1)))
        self.world.serve(member, index, asked)

    @precondition(lambda self: self.world.to_retry)
    @rule()
    def retry(self) -> None:
        world = self.world
        tickets, world.to_retry = world.to_retry, []
        for ticket in tickets:
            if world.leader is not None:
                world.serve(world.leader, len(world.log), ticket)

    @rule(count=st.integers(1, 3))
    def commit(self, count: int) -> None:
        self.world.commit(count)

    @rule(member=st.integers(0, 2), count=st.integers(1, 5))
    def apply(self, member: int, count: int) -> None:
        self.world.members[member].apply(count)

    @rule(member=st.integers(0, 2), surviving=st.integers(0, 3))
    def elect(self, member: int, surviving: int) -> None:
        self.world.elect(member, surviving)

    @rule(member=st.integers(0, 2))
    def notice_the_leader(self, member: int) -> None:
        if self.world.members[member] is not self.world.leader:
            self.world.members[member].step_down()

    @precondition(lambda self: self.world.stale)
    @rule()
    def pass_on_stale(self) -> None:
        self.world.pass_on_stale()

    @rule()
    def time_out_lost(self) -> None:
        self.world.time_out_lost()

    @rule(seconds=SHORT_S)
    def time_passes(self, seconds: float) -> None:
        self.world.now += seconds
        for member in self.world.members:
            member.beat()

    @rule(seconds=LONG_S, standing=st.sets(st.integers(0, 2)))
    def some_stand_still(self, seconds: float, standing: set[int]) -> None:
        """Members that do not run beat once when they do again; the others beat as usual."""
        world = self.world
        until = world.now + seconds
        while world.now < until:
            world.now = min(world.now + 0.1, until)
            for index, member in enumerate(world.members):
                if index not in standing or world.now >= until:
                    member.beat()

    @rule(data=st.data())
    def renew_undisturbed(self, data: st.DataObject) -> None:
        self.world.renew(data.draw(st.integers(1, self.next_id)))

    @rule(seconds=st.sampled_from([0.2, 0.4, 0.6, 1.1, 2.1]))
    def quiet(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule()
    def everything_arrives(self) -> None:
        self.world.settle()

    @invariant()
    def never_early_never_revived(self) -> None:
        assert not self.world.early()
        assert not self.world.revived()

    def teardown(self) -> None:
        """Faults are over: every lease without renewals ends in time, and on all members."""
        world = self.world
        self.faults_are_over()
        quiet_since = world.now
        world.advance(3 + LOGGED_S + LATE_MAX_S)
        for lease_id, ended_at in world.ended.items():
            last = max(world.last_sent_at[lease_id], quiet_since)
            assert ended_at <= last + max(world.ttl_s[lease_id], OUTAGE_GRACE_S) + LATE_MAX_S, lease_id
        assert not world.oracle.applier.leases.granted
        for member in world.members:
            assert not member.machine.applier.leases.granted
            assert len(member.times) == 0
        self.never_early_never_revived()

    def faults_are_over(self) -> None:
        world = self.world
        for member in world.members:
            if member is not world.leader:
                member.step_down()
        world.settle()
        world.time_out_lost()


@pytest.mark.long
def test_leases_keep_their_time_through_changes_of_leaders() -> None:
    run_state_machine_as_test(
        LessorMachine,
        settings=settings(
            max_examples=120,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        ),
    )
