"""Arbitrary schedules of a whole cluster: messages lost, doubled, reordered; slow disks, crashes, new members."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raftkv.raft.types import ConfChange, ConfChangeSingle, ConfChangeTransition, ConfChangeType
from tests.long import long_except

from .world import ELECTION_TICKS, POOL, World

member_ids = st.sampled_from(POOL)
positions = st.integers(0, 30)


def _change(kinds: list[ConfChangeType], first: int, transition: ConfChangeTransition) -> ConfChange:
    changes = tuple(ConfChangeSingle(kind, (first + at) % len(POOL) + 1) for at, kind in enumerate(kinds))
    return ConfChange(changes, transition)


class Cluster(RuleBasedStateMachine):
    """Each rule is a possible event; ``World`` implements the events."""

    @initialize(
        seed=st.integers(0, 1 << 16),
        pre_vote=st.booleans(),
        check_quorum=st.booleans(),
        quiet_commits=st.booleans(),
        window=st.integers(1, 4),
        message_bytes=st.sampled_from([0, 60, 1 << 20]),
        page_bytes=st.sampled_from([40, 1 << 20]),
        elect=st.booleans(),
    )
    def start(
        self,
        seed: int,
        pre_vote: bool,
        check_quorum: bool,
        quiet_commits: bool,
        window: int,
        message_bytes: int,
        page_bytes: int,
        elect: bool,
    ) -> None:
        self.world = World(
            seed,
            pre_vote=pre_vote,
            check_quorum=check_quorum,
            quiet_commits=quiet_commits,
            max_inflight_messages=window,
            max_size_per_message_bytes=message_bytes,
            max_committed_size_per_ready_bytes=page_bytes,
        )
        if elect:
            self.world.members[1].node.campaign()
            self.world.exchange({1, 2, 3}, 8)

    @precondition(lambda self: self.world.network)
    @rule(position=positions, keep=st.booleans())
    def deliver(self, position: int, keep: bool) -> None:
        self.world.deliver(position, keep)

    @precondition(lambda self: self.world.network)
    @rule(position=positions)
    def lose(self, position: int) -> None:
        self.world.lose(position)

    @precondition(lambda self: self.world.network)
    @rule(cut=member_ids)
    def lose_all_of(self, cut: int) -> None:
        self.world.lose_all_of(cut)

    @rule(member=member_ids, peer=member_ids)
    def report_unreachable(self, member: int, peer: int) -> None:
        self.world.members[member].node.report_unreachable(peer)

    @rule(member=member_ids)
    def take(self, member: int) -> None:
        self.world.take(member)

    @rule(member=member_ids)
    def write(self, member: int) -> None:
        self.world.write(member)

    @rule(member=member_ids)
    def apply(self, member: int) -> None:
        self.world.apply(member)

    @rule(member=member_ids, back=st.integers(0, 5), survivors=st.integers(0, 3))
    def crash(self, member: int, back: int, survivors: int) -> None:
        self.world.crash(member, back, survivors)

    @rule(member=member_ids, keep=st.integers(0, 3))
    def compact(self, member: int, keep: int) -> None:
        self.world.compact(member, keep)

    @rule(member=member_ids, count=st.integers(1, 2 * ELECTION_TICKS))
    def tick(self, member: int, count: int) -> None:
        self.world.tick(member, count)

    @rule(member=member_ids)
    def campaign(self, member: int) -> None:
        self.world.members[member].node.campaign()

    @rule(member=member_ids, count=st.integers(1, 3))
    def propose(self, member: int, count: int) -> None:
        self.world.propose(member, count)

    @precondition(lambda self: self.world.leader() is not None)
    @rule(count=st.integers(1, 4))
    def propose_to_the_leader(self, count: int) -> None:
        leader = self.world.leader()
        assert leader is not None
        self.world.propose(leader.id, count)

    @precondition(lambda self: self.world.leader() is not None)
    @rule(
        kinds=st.lists(st.sampled_from(ConfChangeType), max_size=3),
        first=member_ids,
        transition=st.sampled_from(ConfChangeTransition),
    )
    def change_membership(self, kinds: list[ConfChangeType], first: int, transition: ConfChangeTransition) -> None:
        self.world.change_membership(_change(kinds, first, transition))

    @rule(member=member_ids)
    def read(self, member: int) -> None:
        self.world.read(member)

    @rule(member=member_ids, to=member_ids)
    def transfer(self, member: int, to: int) -> None:
        self.world.members[member].node.transfer_leader(to)

    @rule(member=member_ids)
    def forget_leader(self, member: int) -> None:
        self.world.members[member].node.forget_leader()

    @rule(members=st.sets(member_ids, min_size=2), rounds=st.integers(1, 6))
    def exchange(self, members: set[int], rounds: int) -> None:
        self.world.exchange(members, rounds)

    @invariant()
    def the_rules_hold(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.check_progress()


TestCluster = Cluster.TestCase
TestCluster.settings = settings(
    max_examples=40, stateful_step_count=80, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


def _random_step(world: World, rng: random.Random) -> None:
    member = rng.choice(POOL)
    leader = world.leader()
    roll = rng.random()
    if roll < 0.25:
        world.exchange(set(rng.sample(POOL, rng.randint(2, 4))), rng.randint(1, 4))
    elif roll < 0.40:
        world.deliver(rng.randrange(1 << 16), keep=rng.random() < 0.2)
    elif roll < 0.58:
        rng.choice((world.take, world.write, world.apply))(member)
    elif roll < 0.72:
        world.propose(leader.id if leader and rng.random() < 0.8 else member, rng.randint(1, 3))
    elif roll < 0.80:
        world.tick(member, rng.randint(1, 6))
    elif roll < 0.85:
        world.read(leader.id if leader and rng.random() < 0.5 else member)
    elif roll < 0.88:
        kinds = [rng.choice(list(ConfChangeType)) for _ in range(rng.choice((0, 1, 1, 2, 3)))]
        world.change_membership(_change(kinds, member, rng.choice(list(ConfChangeTransition))))
    elif roll < 0.92:
        rng.choice((world.lose, world.lose_all_of))(rng.randrange(1 << 16) if rng.random() < 0.5 else member)
    elif roll < 0.95:
        world.compact(member, rng.randrange(3))
    elif roll < 0.98:
        world.crash(member, rng.randrange(4), rng.randrange(3))
    else:
        world.members[member].node.transfer_leader(rng.choice(POOL))


@pytest.mark.parametrize("seed", long_except(range(100), range(25)))
def test_seeded_schedule(seed: int) -> None:
    rng = random.Random(seed)
    world = World(
        seed,
        pre_vote=rng.random() < 0.7,
        check_quorum=rng.random() < 0.7,
        quiet_commits=rng.random() < 0.7,
        max_inflight_messages=rng.randint(1, 4),
        max_size_per_message_bytes=rng.choice((0, 60, 1 << 20)),
        max_committed_size_per_ready_bytes=rng.choice((40, 1 << 20)),
        max_uncommitted_bytes=rng.choice((20, 0)),
    )
    for _ in range(150):
        _random_step(world, rng)
        world.check()
    world.check_progress()
