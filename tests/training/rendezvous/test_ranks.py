"""Ranks: a permutation for any members, and Horovod's terms."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from raftkv.training.records import Member
from raftkv.training.rendezvous.world import Placement, first_ranks, placements, world_size

MEMBERS = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 5)), max_size=9).map(
    lambda drawn: [Member(f"{host}-{index}", host, slots=slots) for index, (host, slots) in enumerate(drawn)]
)


def test_two_hosts_of_different_size() -> None:
    members = [Member("a-1", "a", slots=2), Member("b-1", "b", slots=3)]
    assert placements(members) == [
        Placement(0, 0, local_rank=0, local_size=2, cross_rank=0, cross_size=2),
        Placement(0, 1, local_rank=1, local_size=2, cross_rank=0, cross_size=2),
        Placement(1, 2, local_rank=0, local_size=3, cross_rank=1, cross_size=2),
        Placement(1, 3, local_rank=1, local_size=3, cross_rank=1, cross_size=2),
        Placement(1, 4, local_rank=2, local_size=3, cross_rank=0, cross_size=1),
    ]


def test_members_on_one_host_share_its_local_ranks_even_apart() -> None:
    members = [Member("a-1", "a"), Member("b-1", "b"), Member("a-2", "a")]
    assert [(one.rank, one.local_rank, one.local_size) for one in placements(members)] == [
        (0, 0, 2),
        (1, 0, 1),
        (2, 1, 2),
    ]


def test_no_members_have_no_ranks() -> None:
    assert placements([]) == []
    assert world_size([]) == 0
    assert first_ranks([]) == []


@given(MEMBERS)
def test_ranks_count_every_slot_once_in_the_order_of_members(members: list[Member]) -> None:
    places = placements(members)
    assert [place.rank for place in places] == list(range(world_size(members)))
    expected = [index for index, member in enumerate(members) for _ in range(member.slots)]
    assert [place.member for place in places] == expected
    assert first_ranks(members) == [expected.index(index) for index in range(len(members))]


@given(MEMBERS)
def test_local_ranks_count_the_slots_of_a_host(members: list[Member]) -> None:
    by_host: dict[str, list[Placement]] = defaultdict(list)
    for place in placements(members):
        by_host[members[place.member].host].append(place)
    for places in by_host.values():
        assert [place.local_rank for place in places] == list(range(len(places)))
        assert {place.local_size for place in places} == {len(places)}


@given(MEMBERS)
def test_cross_ranks_count_the_hosts_that_have_the_local_rank(members: list[Member]) -> None:
    by_local: dict[int, list[Placement]] = defaultdict(list)
    for place in placements(members):
        by_local[place.local_rank].append(place)
    for places in by_local.values():
        assert sorted(place.cross_rank for place in places) == list(range(len(places)))
        assert {place.cross_size for place in places} == {len(places)}
