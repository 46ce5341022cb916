"""Scenarios of leases and leader changes that random schedules rarely reach, each for one past bug."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from raftkv import errors
from raftkv.apply import wire
from raftkv.apply.wire import Caller, Kind
from raftkv.pb import raft_pb2, rpc_pb2
from raftkv.replica.lease import renewals
from raftkv.replica.lease import times as lease_times
from raftkv.replica.lease.times import QUEUED_PER_STEP, UNLOGGED, LeaseClock, LeaseTimes
from tests.apply.auth.machine import HASHED, READWRITE, permission
from tests.apply.machine import Machine
from tests.compat.store import put
from tests.replica.lease.lessor_world import LogEntry, World

CORRUPT = rpc_pb2.AlarmRequest(action=rpc_pb2.AlarmRequest.ACTIVATE, memberID=1, alarm=rpc_pb2.CORRUPT)
DISARM = rpc_pb2.AlarmRequest(action=rpc_pb2.AlarmRequest.DEACTIVATE, memberID=1, alarm=rpc_pb2.CORRUPT)


def led_by(index: int, ttl_s: int = 2) -> World:
    """Three members, a leader, and lease 7."""
    world = World(3)
    world.elect(index)
    world.settle()
    world.grant(7, ttl_s)
    world.settle()
    return world


@pytest.fixture
def world() -> World:
    return led_by(0)


def test_one_entry_ends_leases_of_many_keys_a_few_at_a_time(world: World) -> None:
    """A hundred leases of 10,000 keys each, which end together, were one entry of a million deletions."""
    for lease_id in range(100, 130):
        world.grant(lease_id, 2)
        world.keys_of[lease_id] = 1_500
    world.advance(4.0)
    expired = [
        raft_pb2.LeaseDecision.FromString(entry.body).ids for entry in world.log if entry.kind == Kind.LEASE_EXPIRE
    ]
    assert {lease_id for ids in expired for lease_id in ids} >= set(range(100, 130))
    assert max(len(ids) for ids in expired) == 3


def test_a_new_leader_keeps_the_time_that_is_left() -> None:
    world = led_by(0, ttl_s=10)
    granted_at = world.now
    world.advance(8.0)
    world.elect(1)
    world.advance(5.0)
    assert granted_at + 10 <= world.ended[7] <= granted_at + 10.7


@pytest.mark.parametrize(("after_outage", "kept_s"), [(False, 3.5), (True, 4.5)], ids=["at once", "after an outage"])
def test_a_new_leader_waits_longer_for_owners_that_were_turned_away(world, after_outage, kept_s):
    granted_at = world.now
    for _ in range(25):  # just over
        world.now += 0.1
        world.members[1].beat()
    world.elect(1, after_outage=after_outage)
    world.advance(5.0)
    assert granted_at + kept_s <= world.ended[7] <= granted_at + kept_s + 0.2


def test_a_change_of_leaders_queues_very_many_leases_in_steps() -> None:
    """At once it took 0.8 s for a million."""
    now = 100.0
    clock = LeaseClock(lambda: now)
    times = LeaseTimes(clock, lambda lease_id: None)
    count = 2 * QUEUED_PER_STEP + 100
    for lease_id in range(count):
        times.granted(lease_id, 1)
    times.promote()
    assert times.renew(0) == UNLOGGED, "known at once"
    for _ in range(4):
        now += 0.4
        clock.beat()
    taken = [len(times.take_due(count))]
    while times.queue_some():
        taken.append(len(times.take_due(count)))
    taken.append(len(times.take_due(count)))
    assert sum(taken) == count
    assert max(taken) <= QUEUED_PER_STEP


def test_a_renewal_from_memory_holds_under_the_next_leader(world: World) -> None:
    world.renew(7)
    entries = len(world.log)
    world.advance(0.4)
    answered = world.renew(7)
    assert answered.ttl_s == 2
    assert len(world.log) == entries, "answered from memory"
    world.elect(1)
    world.advance(5.0)
    assert world.ended[7] >= answered.sent_at + 2
    assert not world.early()


def test_half_a_second_after_a_renewal_the_next_is_logged_again(world: World) -> None:
    world.renew(7)
    entries = len(world.log)
    world.advance(0.51)
    world.renew(7)
    assert [entry.kind for entry in world.log[entries:]] == [Kind.LEASE_RENEW]


def test_the_end_that_a_deposed_leader_decided_has_no_effect(world: World) -> None:
    old = world.members[0]
    world.elect(1)
    world.settle()
    for _ in range(19):
        world.now += 0.1
        old.clock.beat()
    world.renew(7)
    world.now += 0.2
    old.beat()  # it has not noticed that it leads no more
    assert [entry.kind for entry in world.stale] == [Kind.LEASE_EXPIRE]
    world.pass_on_stale()
    world.settle()
    assert not world.ended
    assert world.leader is not None
    assert 7 in world.leader.machine.applier.leases.granted


def test_renewal_logged_by_deposed_leader_is_not_answered(world: World) -> None:
    old = world.members[0]
    world.now += 1.0
    asked = world.keep_alive(7)
    world.elect(1)
    world.settle()
    old.renewals.take([asked])
    world.pass_on_stale()
    world.settle()
    assert asked.ttl_s is None
    assert world.to_retry == [asked], "another leader must answer"


def test_request_waiting_at_a_deposed_leader_is_answered_once_by_the_next(world: World) -> None:
    old = world.members[0]
    asked = world.keep_alive(7)
    world.serve(old, 0, asked)
    assert [entry.kind for entry in world.appended] == [Kind.LEASE_RENEW]
    world.elect(1, surviving=1)
    old.step_down()
    assert world.to_retry == [asked]
    world.settle()
    assert asked.ttl_s is None, "the next leader may have counted otherwise by now"


def test_new_leader_expires_nothing_before_applying_committed(world: World) -> None:
    world.advance(1.5)
    asked = world.keep_alive(7)
    leader = world.members[0]
    world.serve(leader, 0, asked)
    world.commit(1)
    leader.apply(1)
    assert asked.ttl_s == 2
    world.elect(1)
    for _ in range(20):
        world.now += 0.1
        world.members[1].beat()
    assert not world.appended
    world.advance(3.0)
    assert not world.early()
    assert 7 in world.ended


def test_freshness_is_not_measured_in_lease_time() -> None:
    world = led_by(0, ttl_s=1)
    old = world.members[0]
    world.now += 5.0  # it stands still: its lease clock waits for a beat
    world.renew(7)
    confirmed = world.keep_alive(7)
    confirmed_at = len(world.log)
    world.elect(1)
    for _ in range(30):
        world.now += 0.1
        world.members[1].beat()
        world.commit(9)
        world.members[1].apply(9)
    assert 7 in world.ended
    old.renewals.take([confirmed])
    assert confirmed.ttl_s is None, confirmed_at


def test_a_pause_of_the_process_does_not_count(world: World) -> None:
    world.now += 60.0  # no beat
    assert world.renew(7).ttl_s == 2, "the keep-alive lay in the socket"
    world.advance(1.0)
    assert not world.ended


def test_expired_lease_is_never_revived(world: World) -> None:
    leader = world.members[0]
    for _ in range(21):
        world.now += 0.1
        leader.beat()
    assert [entry.kind for entry in world.appended] == [Kind.LEASE_EXPIRE]
    asked = world.keep_alive(7)
    world.serve(leader, 0, asked)
    assert asked.ttl_s is None
    world.settle()
    assert asked.ttl_s == 0
    assert 7 in world.ended


def test_an_end_that_was_lost_is_proposed_again(world: World) -> None:
    for _ in range(21):
        world.now += 0.1
        world.members[0].beat()
    (entry,) = world.appended
    world.appended.clear()
    assert entry.done is not None
    entry.done(errors.RequestTimeoutError())
    assert world.renew(7).ttl_s is None, "expiring: the lost proposal might have arrived"
    world.advance(0.2)
    assert 7 in world.ended


def _over_and_late() -> tuple[World, LogEntry]:
    """Lease 7 is over; who proposed its end has heard that it took too long, and it is in the log all the same."""
    world = led_by(0)
    for _ in range(21):
        world.now += 0.1
        world.members[0].beat()
    (entry,) = world.appended
    assert entry.done is not None
    entry.done(errors.RequestTimeoutError())
    entry.done = None
    return world, entry


def test_regranted_lease_outlives_its_predecessor() -> None:
    """The end that took too long is applied with the next grant of the id, before the leader looks again."""
    world, _ = _over_and_late()
    world.grant(7, 10)
    world.settle()
    granted_at = world.now
    world.advance(3.0)
    assert 7 in world.members[0].machine.applier.leases.granted
    assert world.renew(7).ttl_s == 10
    world.advance(12.0)
    assert world.ended[7] >= granted_at + 10


def test_an_end_that_may_be_in_the_log_is_not_proposed_behind_a_new_grant() -> None:
    world, _ = _over_and_late()
    request = rpc_pb2.LeaseGrantRequest(ID=7, TTL=10)
    world.propose(None, LogEntry(Kind.LEASE_GRANT, request.SerializeToString()))
    for _ in range(3):
        world.now += 0.1
        world.members[0].beat()
    assert [entry.kind for entry in world.appended] == [Kind.LEASE_EXPIRE, Kind.LEASE_GRANT]
    world.settle()
    world.advance(3.0)
    assert world.renew(7).ttl_s == 10


@pytest.mark.parametrize("caller", [None, Caller(b"alice", 1)], ids=["without users", "by a user"])
def test_an_end_is_not_put_behind_a_revocation_and_a_new_grant(world: World, caller: Caller | None) -> None:
    """A client asks for a new lease just when the old one is over: the end would be that of the new one."""
    for _ in range(19):
        world.now += 0.1
        world.members[0].beat()
    world.revoke_and_grant(7, 10, caller)
    for _ in range(5):
        world.now += 0.1
        world.members[0].beat()
    kinds = [entry.kind for entry in world.appended]
    assert kinds == [Kind.LEASE_REVOKE if caller is None else wire.IDENTIFIED, Kind.LEASE_GRANT]
    world.settle()
    world.advance(3.0)
    assert world.renew(7).ttl_s == 10
    world.advance(12.0)
    assert world.ended[7] >= 100 + 10


def test_lease_ends_despite_refused_revocation(world: World) -> None:
    for _ in range(19):
        world.now += 0.1
        world.members[0].beat()
    world.propose(None, LogEntry(Kind.LEASE_REVOKE, b"\x08"))
    identified = wire.identified(Caller(b"alice", 1), Kind.LEASE_REVOKE, b"\x08\x07")
    world.propose(None, LogEntry(wire.IDENTIFIED, identified[:-4]))
    world.propose(None, LogEntry(wire.IDENTIFIED, identified))
    world.members[0].machine.applier.alarms.execute(CORRUPT)
    for _ in range(5):
        world.now += 0.1
        world.members[0].beat()
    assert len(world.appended) == 3
    for member in world.members:
        member.machine.applier.alarms.execute(CORRUPT)
    world.settle()
    for member in world.members:
        member.machine.applier.alarms.execute(DISARM)
    world.advance(0.3)
    assert all(not member.machine.applier.leases.granted for member in world.members)


@pytest.mark.interpreted
def test_lease_unknown_to_a_new_leader_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewals, "LOOKS_PER_SWEEP", 10)
    world = led_by(0)
    for _ in range(19):
        world.now += 0.1
        world.members[0].beat()
    for _ in range(35):
        world.propose(None, LogEntry(Kind.PUT, b""))
    looked = 0
    while not any(entry.kind == Kind.LEASE_EXPIRE for entry in world.appended):
        world.now += 0.1
        world.members[0].beat()
        looked += 1
    assert looked == 2 + 35 // 10
    world.settle()
    assert 7 in world.ended


def test_leases_of_one_owner_that_expire_together_do_not_delay_those_of_others() -> None:
    now = 100.0
    clock = LeaseClock(lambda: now)
    owners = {1001: b"alice", 1002: b"alice", 1003: b""}
    times = LeaseTimes(clock, lambda lease_id: None, lambda lease_id: owners.get(lease_id, b"mallory"))
    times.promote()
    for lease_id in range(1, 1004):
        times.granted(lease_id, 5)
    for _ in range(60):
        now += 0.1
        clock.beat()
    assert times.take_due(2) == [1, 1001]
    assert times.take_due(4) == [1003, 2, 1002, 3]
    rest = times.take_due(2000)
    assert rest == list(range(4, 1001))
    assert not times.has_due()


@pytest.mark.interpreted
def test_leases_that_were_renewed_are_put_right_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Very many that were granted together come up together, and all of a start: 100,000 took a turn of 0.3 s."""
    monkeypatch.setattr(lease_times, "LOOKS_PER_STEP", 50)
    now, looks = 100.0, 0
    clock = LeaseClock(lambda: now)
    times = LeaseTimes(clock, lambda lease_id: None)
    count = 1000
    for lease_id in range(1, count + 1):
        times.granted(lease_id, 10)
    times.promote()
    while times.queue_some():
        pass
    end_of = LeaseTimes._end_of

    def counted(times: LeaseTimes, lease: Any) -> float:
        nonlocal looks
        looks += 1
        return end_of(times, lease)

    monkeypatch.setattr(LeaseTimes, "_end_of", counted)

    def pass_time(seconds: float) -> None:
        nonlocal now
        for _ in range(int(seconds * 10)):
            now += 0.1
            clock.beat()

    pass_time(5)
    for lease_id in range(1, count):  # all but the last
        times.renew(lease_id)
    pass_time(7)
    looks = 0
    assert not times.has_due()
    steps = 0
    while not times.has_due() and times.queue_some():
        steps += 1
        assert looks <= 3 * 51
        looks = 0
    assert steps >= count // 150
    assert times.take_due(10) == [count]
    assert not times.has_due()


def test_the_leases_of_a_received_database_are_taken_over_in_steps() -> None:
    """A million in the turn of the swap took seconds."""
    there, here = Machine(), Machine()
    many = 4 * lease_times.RECEIVED_PER_STEP
    for machine, first in ((there, many // 2), (here, 0)):
        for lease_id in range(first + 1, first + many + 1):
            machine.applier.leases.grant(lease_id, 10)
    there.store.set_applied(1, 1)
    there.store.commit()
    now, ended = 100.0, []
    times = LeaseTimes(LeaseClock(lambda: now), ended.append)
    times.reloaded(here.applier.leases.granted)
    while times.queue_some():
        pass
    leases = here.applier.leases
    leases.observer = times
    steps = 0
    for _ in leases.receive(there.backend.begin_read()):
        steps += 1
        assert (leases.exists(1), len(times), ended) == (True, many, [])
    assert steps >= 2 * many // lease_times.RECEIVED_PER_STEP
    now = 200.0
    leases.reload()
    assert (min(leases.granted), max(leases.granted), len(times)) == (many // 2 + 1, many // 2 + many, many)
    assert len(ended) == lease_times.RECEIVED_PER_STEP, "the others in the next steps"
    (anew, *_) = sorted(set(range(1, many // 2 + 1)) - set(ended))
    leases.grant(anew, 10)
    while times.queue_some():
        pass
    assert sorted([*ended, anew]) == list(range(1, many // 2 + 1)), "what is granted anew is another lease"
    times.promote()
    assert times.remaining_s(many) <= 10 + lease_times.LOGGED_S


def test_many_leases_end_in_small_entries_one_after_the_other() -> None:
    world = World(1)
    world.elect(0)
    for lease_id in range(1, 251):
        world.grant(lease_id, 1)
    world.settle()
    before = len(world.log)
    world.advance(1.2)
    sizes = [entry.kind for entry in world.log[before:]]
    assert sizes == [Kind.LEASE_EXPIRE] * 3
    assert len(world.ended) == 250
    assert len(world.members[0].times) == 0


def test_the_renewals_of_a_moment_are_one_entry() -> None:
    world = World(1)
    world.elect(0)
    for lease_id in range(1, 251):
        world.grant(lease_id, 1)
    world.settle()
    before = len(world.log)
    asked = [world.keep_alive(lease_id) for lease_id in range(1, 251)]
    leader = world.members[0]
    leader.renewals.take(list(asked[:100]))
    leader.renewals.take(list(asked[100:]))  # the first entry is under way: these gather
    world.settle()
    assert [entry.kind for entry in world.log[before:]] == [Kind.LEASE_RENEW] * 2
    assert all(one.ttl_s == 1 for one in asked)


def test_a_new_leader_knows_of_renewals_in_the_log(world: World) -> None:
    world.advance(1.5)
    renewed = world.renew(7)
    world.elect(1)
    world.advance(5.0)
    assert renewed.sent_at + 2 <= world.ended[7] <= renewed.sent_at + 2.7


def _shorten(world: World, lease_id: int, grace_s: float, age_s: float) -> float | None:
    """The connection of the owner breaks now, at the leader."""
    assert world.leader is not None
    return world.leader.times.shorten(lease_id, grace_s, age_s)


def test_a_lease_whose_owner_is_gone_ends_after_its_grace() -> None:
    world = led_by(0, ttl_s=60)
    world.renew(7)
    world.advance(3.0)
    broke_at = world.now
    assert _shorten(world, 7, 0.3, age_s=3.0) == 0.3
    world.advance(2.0)
    assert broke_at + 0.3 <= world.ended[7] <= broke_at + 0.5


def _user(world: World, name: str) -> Caller:
    """A user, as let in just now."""
    return Caller(name.encode(), world.oracle.applier.auth.revision)


def _propose(world: World, kind: int, request: Any, who: str = "root") -> None:
    """Put a request of a user into the log, where users are asked for."""
    body = request.SerializeToString()
    body = wire.versioned(kind, body) if kind == Kind.AUTH else body
    if world.oracle.applier.auth.is_enabled:
        kind, body = Kind.IDENTIFIED, wire.identified(_user(world, who), kind, body)
    world.propose(None, LogEntry(kind, body))


def _propose_change(world: World, **change: Any) -> None:
    _propose(world, Kind.AUTH, raft_pb2.AuthChange(**change))


def _change(world: World, **change: Any) -> None:
    _propose_change(world, **change)
    world.settle()


def _with_users(ttl_s: int, *, enable: bool = True) -> World:
    """A leader, lease 7 with Alice's key, and what Alice may do."""
    world = led_by(0, ttl_s)
    _change(world, role_add={"name": "hers"})
    _change(world, role_grant_permission={"name": "hers", "perm": permission(READWRITE, b"a")})
    for name, role in (("root", "root"), ("alice", "hers")):
        _change(world, user_add={"name": name, "hashedPassword": HASHED})
        _change(world, user_grant_role={"user": name, "role": role})
    if enable:
        _change(world, enable={})
    _propose(world, Kind.PUT, put(b"a", b"", lease=7), "alice")
    world.settle()
    world.renew(7)
    return world


def _is_kept(world: World) -> bool:
    kept = {7 in member.machine.applier.leases.granted for member in world.members}
    assert len(kept) == 1, "members differ"
    return kept.pop()


AMID_A_GRACE: list[tuple[str, Callable[[World], None], bool]] = [
    ("nothing", lambda world: None, True),
    ("another's key is attached", lambda world: _propose(world, Kind.PUT, put(b"b", b"", lease=7)), False),
    (
        "the right is revoked",
        lambda world: _propose_change(world, user_revoke_role={"name": "alice", "role": "hers"}),
        False,
    ),
    ("the user is deleted", lambda world: _propose_change(world, user_delete={"name": "alice"}), False),
    (
        "the role loses the key",
        lambda world: _propose_change(world, role_revoke_permission={"role": "hers", "key": b"a"}),
        False,
    ),
    (
        "the password is changed",
        lambda world: _propose_change(world, user_change_password={"name": "alice", "hashedPassword": HASHED}),
        False,
    ),
]


@pytest.mark.parametrize(("act", "ends"), [row[1:] for row in AMID_A_GRACE], ids=[row[0] for row in AMID_A_GRACE])
@pytest.mark.parametrize("is_applied", [True, False], ids=["applied before the end", "in the log before the end"])
def test_a_grace_ends_only_what_its_user_may_delete_at_the_end(act, ends, is_applied):
    world = _with_users(ttl_s=60)
    broke_at = world.now
    assert world.leader is not None
    assert world.leader.times.shorten(7, 0.3, 0.0, _user(world, "alice")) == 0.3
    if is_applied:
        act(world)
        world.settle()
    else:
        world.now += 0.4
        act(world)
        world.leader.beat()
    world.advance(2.0)
    assert _is_kept(world) == (not ends)
    if not ends:
        kept = world.keep_alive(7)
        world.serve(world.leader, len(world.log), kept)
        world.settle()
        assert kept.ttl_s == 60, "its other owners keep it alive"
    world.advance(65.0)
    assert not _is_kept(world)
    assert ends or world.ended[7] >= broke_at + 60


def test_a_grace_of_before_users_were_asked_for_ends_nothing_after() -> None:
    world = _with_users(ttl_s=10, enable=False)
    broke_at = world.now
    assert _shorten(world, 7, 3.0, age_s=0.0) == 3.0
    _change(world, enable={})
    world.advance(5.0)
    assert _is_kept(world)
    world.advance(6.0)
    assert world.ended[7] >= broke_at + 10


def test_a_keep_alive_that_waits_for_an_end_that_is_refused_is_answered() -> None:
    world = _with_users(ttl_s=60)
    assert world.leader is not None
    world.leader.times.shorten(7, 0.3, 0.0, _user(world, "alice"))
    world.now += 0.4
    _propose(world, Kind.PUT, put(b"b", b"", lease=7))
    world.leader.beat()
    waiting = world.renew(7)
    assert waiting.ttl_s == 60


def test_a_keep_alive_within_the_grace_gives_the_whole_ttl_again() -> None:
    world = led_by(0, ttl_s=10)
    world.renew(7)
    assert _shorten(world, 7, 0.3, age_s=0.0) == 0.3
    world.advance(0.1)
    assert world.renew(7).ttl_s == 10
    renewed_at = world.now
    world.advance(12.0)
    assert renewed_at + 10 <= world.ended[7] <= renewed_at + 10.2


def test_a_break_that_is_told_late_ends_nothing_that_was_kept_alive_another_way() -> None:
    world = led_by(0, ttl_s=10)
    world.renew(7)
    world.advance(2.0)
    world.renew(7)
    assert _shorten(world, 7, 0.3, age_s=2.0) is None
    world.advance(5.0)
    assert not world.ended


def test_no_grace_is_longer_than_the_time_that_is_left() -> None:
    world = led_by(0, ttl_s=2)
    world.renew(7)
    renewed_at = world.now
    world.advance(1.0)
    assert _shorten(world, 7, 30.0, age_s=1.0) is None
    assert _shorten(world, 5, 0.1, age_s=1.0) is None, "there is no such lease"
    world.advance(5.0)
    assert world.ended[7] <= renewed_at + 2.2


def test_a_new_leader_that_has_not_heard_of_an_owner_yet_gives_it_time() -> None:
    world = led_by(0, ttl_s=10)
    world.renew(7)
    world.elect(1)
    world.settle()
    broke_at = world.now
    assert _shorten(world, 7, 0.3, age_s=0.5) == 5.0
    world.advance(9.0)
    assert broke_at + 5 <= world.ended[7] <= broke_at + 5.2


def test_many_breaks_leave_no_rubbish() -> None:
    world = led_by(0, ttl_s=10)
    assert world.leader is not None
    for _ in range(3_000):
        world.renew(7)
        _shorten(world, 7, 0.3, age_s=0.0)
    assert world.leader.times._queued < 1_500


def test_a_long_outage_ends_no_lease_before_its_owner_can_be_heard(world: World) -> None:
    for _ in range(100):  # ten seconds without a leader
        world.now += 0.1
        for member in world.members:
            member.step_down()
            member.beat()
    world.elect(1, after_outage=True)
    world.settle()
    elected_at = world.now
    world.advance(0.3)
    assert world.renew(7).ttl_s == 2
    world.grant(8, 1)
    assert not world.ended
    world.advance(5.0)
    assert world.ended[7] >= elected_at + 2.3


@pytest.mark.parametrize(("outage_s", "grace_s"), [(3.0, 1.0), (10.0, 2.0)])
def test_after_an_outage_a_dead_owner_delays_no_waiter(world: World, outage_s: float, grace_s: float) -> None:
    until = world.now + outage_s
    while world.now < until:
        world.now += 0.1
        for member in world.members:
            member.step_down()
            member.beat()
    world.elect(1, after_outage=outage_s > 5)
    world.settle()
    elected_at = world.now
    world.advance(4.0)
    assert elected_at + grace_s <= world.ended[7] <= elected_at + grace_s + 0.2
