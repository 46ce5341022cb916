"""Read leases: arbitrary schedules of three members with clocks of different rates, and the rules one by one."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from raftkv.raft import read_lease
from raftkv.raft.core import LEASE_GIVEN_UP, Raft, RawNode
from raftkv.raft.log import MemoryLog
from raftkv.raft.read_lease import LEASE_NS, RATE_ERROR, ReadLease
from raftkv.raft.types import ConfState, HardState, Message, MessageType, RaftConfig, SnapshotMeta, StateRole
from tests.long import long_except

from .member import FixedRandom, Member

MEMBERS = (1, 2, 3)
SCHEDULES = 400
STEPS = 120


class Leased(Member):
    """A member with its own clock, which runs while the member is down."""

    def __init__(self, id: int, world: World, rate: float) -> None:
        self.world = world
        self.rate = rate
        log = MemoryLog()
        log.conf_state = ConfState(voters=MEMBERS)
        config = RaftConfig(id=id, pre_vote=False, check_quorum=False, election_ticks=10)
        super().__init__(config, log, FixedRandom(id))

    def clock_ns(self) -> int:
        return 1 + int(self.world.now_ns * self.rate)

    def start(self) -> None:
        super().start()
        hard_state = self.log.hard_state
        starts_within_lease = self.world.starts_within_lease and hard_state != HardState()
        config = RaftConfig(
            id=self.id,
            pre_vote=False,
            check_quorum=False,
            applied=self.applied,
            starts_within_lease=starts_within_lease,
        )
        self.node = RawNode(config, self.log, self.rng, self.clock_ns)
        self.node.allow_leases(True)


class World:
    """Three members, and the messages between them."""

    def __init__(self, rng: random.Random, starts_within_lease: bool = True) -> None:
        self.rng = rng
        self.now_ns = 0
        self.starts_within_lease = starts_within_lease
        self.network: list[Message] = []
        rates = [rng.choice((1 - RATE_ERROR, 1.0, 1 + RATE_ERROR)) for _ in MEMBERS]
        self.members = {one: Leased(one, self, rate) for one, rate in zip(MEMBERS, rates, strict=True)}
        self.served = 0

    def work(self, id: int) -> None:
        member = self.members[id]
        while member.node.has_ready():
            self.network += member.work()[1]

    def deliver(self, message: Message) -> None:
        if message.type is MessageType.SNAPSHOT:
            meta = message.snapshot
            assert meta is not None
            self.members[message.to].conf_states.setdefault(meta.index, meta.conf_state)
        self.members[message.to].node.step(message)
        self.work(message.to)

    def elect(self, id: int) -> None:
        """Let a member campaign and win, if it can, by votes that arrive at once, of one other member or of both."""
        self.members[id].node.campaign()
        self.work(id)
        self.vote()

    def vote(self) -> None:
        cut = self.rng.choice(MEMBERS)
        self.exchange(
            lambda message: message.type in (MessageType.VOTE, MessageType.VOTE_RESPONSE) and message.to != cut
        )

    def exchange(self, wanted: Callable[[Message], bool]) -> None:
        """Deliver what is wanted, and its answers, while there is any."""
        while chosen := [message for message in self.network if wanted(message)]:
            self.network = [message for message in self.network if not wanted(message)]
            for message in chosen:
                self.deliver(message)

    def step(self) -> None:
        """Let something happen."""
        rng = self.rng
        one = rng.choice(MEMBERS)
        node = self.members[one].node
        match rng.choices(
            ("deliver", "lose", "link", "time", "tick", "elect", "propose", "transfer", "restart", "compact"),
            (30, 4, 14, 14, 6, 5, 12, 3, 2, 2),
        )[0]:
            case "deliver" if self.network:
                self.deliver(self.network.pop(rng.randrange(len(self.network))))
            case "lose" if self.network:
                self.network.pop(rng.randrange(len(self.network)))
            case "link":
                near, far = rng.sample(MEMBERS, 2)
                self.exchange(lambda message: {message.from_, message.to} == {near, far})
            case "time":
                self.now_ns += int(LEASE_NS * rng.choice((0.02, 0.1, 0.3, 0.55, 0.97)))
            case "tick":
                node.tick()
            case "elect" if node.raft.role is not StateRole.LEADER:
                self.elect(one)
            case "propose" if node.raft.role is StateRole.LEADER and not node.raft.transferee:
                node.propose(b"x")
            case "transfer" if node.raft.role is StateRole.LEADER:
                node.transfer_leader(rng.choice([other for other in MEMBERS if other != one]))
                self.work(one)
                self.exchange(lambda message: message.type is MessageType.TIMEOUT_NOW)
                self.vote()
            case "restart":
                self.members[one].crash()
            case "compact":
                member = self.members[one]
                if member.applied > member.log.first_index():
                    member.compact(member.applied)
        self.work(one)

    def check(self) -> None:
        newest = max(member.node.raft.log.committed for member in self.members.values())
        for one, member in self.members.items():
            index = member.node.read_now()
            self.work(one)
            if index:
                self.served += 1
                assert index >= newest, f"member {one} serves a read at {index}, {newest} is committed"


def play(seed: int, starts_within_lease: bool = True) -> World:
    world = World(random.Random(seed), starts_within_lease)
    world.elect(1)
    world.exchange(lambda message: True)
    for _ in range(STEPS):
        world.step()
        world.check()
    return world


@pytest.mark.parametrize("first", long_except([0, SCHEDULES // 2], [0]))
def test_no_schedule_shows_a_stale_read(first: int) -> None:
    seeds = range(first, first + SCHEDULES // 2)
    assert sum(play(seed).served for seed in seeds) > 5_000


def commits_are_not_held_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReadLease, "must_wait", lambda lease: False)


def lease_counts_from_the_commit(patch: pytest.MonkeyPatch) -> None:
    original = ReadLease.committed

    def committed(lease: ReadLease, index: int) -> None:
        before = lease._until_ns
        original(lease, index)
        if lease._until_ns != before and lease._clock_ns is not None:
            lease._until_ns = lease._clock_ns() + LEASE_NS

    patch.setattr(ReadLease, "committed", committed)


def lease_is_kept_after_handing_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReadLease, "give_up", lambda lease: True)


def release_counts_for_any_later_term(patch: pytest.MonkeyPatch) -> None:
    original = ReadLease.begin

    def begin(lease: ReadLease, term: int) -> None:
        lease._released_term = lease._released_term and term - 1
        original(lease, term)

    patch.setattr(ReadLease, "begin", begin)


def leader_that_waits_does_not_mark(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReadLease, "marks", lambda lease: not lease.wait_until_ns)


def clocks_are_taken_for_equal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(read_lease, "WAIT_NS", LEASE_NS)


def snapshot_is_no_receipt(patch: pytest.MonkeyPatch) -> None:
    original = Raft._restore

    def restore(raft: Raft, snapshot: SnapshotMeta) -> bool:
        before = raft.lease._received_ns
        restored = original(raft, snapshot)
        raft.lease._received_ns = before
        return restored

    patch.setattr(Raft, "_restore", restore)


def lease_survives_its_term(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReadLease, "_end", lambda lease: None)


def reads_before_the_clock(patch: pytest.MonkeyPatch) -> None:
    original, seen = ReadLease.left_ns, dict[int, tuple[int, int]]()

    def left_ns(lease: ReadLease) -> int:
        """Return what was left at the look before the last one."""
        before, last = seen.get(id(lease), (0, 0))
        seen[id(lease)] = (last, original(lease))
        return before

    patch.setattr(ReadLease, "left_ns", left_ns)


RULES: tuple[Callable[[pytest.MonkeyPatch], None], ...] = (
    commits_are_not_held_back, lease_counts_from_the_commit, lease_is_kept_after_handing_over,
    release_counts_for_any_later_term, leader_that_waits_does_not_mark, clocks_are_taken_for_equal,
    snapshot_is_no_receipt, lease_survives_its_term, reads_before_the_clock,
)  # fmt: skip


def test_a_leader_that_waits_cannot_release_its_successor() -> None:
    world = World(random.Random(7))
    world.elect(1)
    world.exchange(lambda message: True)
    world.members[1].node.propose(b"x")
    world.work(1)
    world.exchange(lambda message: True)
    assert world.members[1].node.read_now() > 0
    # Member 1 is cut off from here on, and has its lease.
    for leader, voter in ((2, 3), (3, 2)):
        if leader == 2:
            world.members[2].node.campaign()
        else:
            world.members[2].node.transfer_leader(3)
            world.work(2)
            handed_over = [message for message in world.network if message.type is MessageType.TIMEOUT_NOW]
            assert [message.context for message in handed_over] == [b""]
        world.work(leader)
        world.exchange(lambda message: 1 not in (message.to, message.from_))
        assert world.members[leader].node.raft.role is StateRole.LEADER
        assert not world.members[leader].node.raft.log.committed > world.members[1].node.read_now(), voter
    world.now_ns += 2 * LEASE_NS
    world.members[3].node.tick()
    assert world.members[3].node.raft.log.committed > world.members[1].node.raft.log.committed
    assert world.members[1].node.read_now() == 0


def test_a_leader_that_hands_over_releases_its_successor_and_reads_no_more() -> None:
    world = World(random.Random(7))
    world.elect(1)
    world.exchange(lambda message: True)
    world.members[1].node.propose(b"x")
    world.work(1)
    world.exchange(lambda message: True)
    assert world.members[1].node.read_now() > 0
    world.members[1].node.transfer_leader(2)
    world.work(1)
    assert [message.context for message in world.network] == [LEASE_GIVEN_UP]
    assert world.members[1].node.read_now() == 0
    before = world.members[1].node.raft.log.committed
    world.exchange(lambda message: True)
    assert world.members[2].node.raft.log.committed > before


def test_failed_transfer_leaves_reads_to_rounds_and_appends_nothing_for_them() -> None:
    world = World(random.Random(7))
    world.elect(1)
    world.exchange(lambda message: True)
    leader = world.members[1].node
    leader.transfer_leader(2)
    world.work(1)
    world.network.clear()
    for _ in range(25):
        leader.tick()
        world.work(1)
        world.exchange(lambda message: True)
    assert leader.raft.role is StateRole.LEADER
    before = leader.raft.log.last_index
    for _ in range(10):
        assert leader.read_now() == 0
        world.work(1)
        world.exchange(lambda message: True)
    assert leader.raft.log.last_index == before


FIRST_SEEDS = {
    "release_counts_for_any_later_term": 440,
    "leader_that_waits_does_not_mark": 190,
    "clocks_are_taken_for_equal": 860,
    "snapshot_is_no_receipt": 370,
}
"""Where to begin to look for those that chance does not meet at once; should schedules change, they are found later."""


def hunt(first: int, starts_within_lease: bool = True) -> int | None:
    for seed in range(first, first + 3 * SCHEDULES):
        try:
            play(seed, starts_within_lease)
        except AssertionError as error:
            if "serves a read" in str(error):
                return seed
            raise
    return None


@pytest.mark.interpreted
@pytest.mark.parametrize("rule", RULES)
def test_without_a_rule_a_schedule_shows_a_stale_read(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rule(monkeypatch)
    assert hunt(FIRST_SEEDS.get(rule.__name__, 0)) is not None


def test_restarted_members_that_do_not_wait_show_a_stale_read() -> None:
    assert hunt(370, starts_within_lease=False) is not None
