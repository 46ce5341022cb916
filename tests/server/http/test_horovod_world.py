"""The place of a Horovod worker, as a member reads it from the records that a training run writes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv.config import ServerConfig
from raftkv.errors import ConfigError
from raftkv.server.horovod.world import NO_SLOT, DamagedRecordError, Slot, read_round, read_state
from raftkv.training.records import Member, Round, State
from raftkv.training.rendezvous.ranks import placements, world_size

MEMBERS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 4)), max_size=6)


@given(MEMBERS)
def test_every_slot_is_where_the_run_has_it(hosts: list[tuple[str, int]]) -> None:
    members = [Member(f"n{number}", host, slots=slots) for number, (host, slots) in enumerate(hosts)]
    world = read_round(Round(7, tuple(members), time=1.5).encode())
    assert world.epoch == 7
    size = world_size(members)
    for place in placements(members):
        expected = Slot(place.rank, size, place.local_rank, place.local_size, place.cross_rank, place.cross_size)
        assert world.slot(members[place.member].host, place.local_rank) == expected
    for host in "abcd":
        there = sum(slots for name, slots in hosts if name == host)
        assert world.slot(host, there) == NO_SLOT


def test_states_are_read() -> None:
    assert read_state(State(3, "broken", "node lost").encode()) == (3, "broken")


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"epoch":true}',
        b'{"epoch":-1}',
        b'{"epoch":1,"members":{}}',
        b'{"epoch":1,"members":[1]}',
        b'{"epoch":1,"members":[{"host":1}]}',
        b'{"epoch":1,"members":[{"host":"a","slots":-1}]}',
        b'{"epoch":1,"members":[{"host":"a","slots":1.5}]}',
        b'{"epoch":1,"members":[{"host":"a","slots":2000000}]}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_round_is_refused(value: bytes) -> None:
    with pytest.raises(DamagedRecordError):
        read_round(value)


@pytest.mark.parametrize("value", [b"", b"{}", b'{"epoch":1}', b'{"epoch":"1","phase":"running"}'])
def test_what_is_no_state_is_refused(value: bytes) -> None:
    with pytest.raises(DamagedRecordError):
        read_state(value)


@pytest.mark.parametrize("run", ["a b", "/a", "a/", "a//b", "a\n", "x" * 201])
def test_the_flag_takes_run_ids_only(run: str) -> None:
    assert ServerConfig(horovod_run="team/job-1").horovod_run == "team/job-1"
    with pytest.raises(ConfigError, match=r"^--horovod-run .* is no run id"):
        ServerConfig(horovod_run=run)
