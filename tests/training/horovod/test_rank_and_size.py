"""The place of a Horovod worker, as a member answers it from what a training run has recorded."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv.client.records import RecordError
from raftkv.config import ServerConfig
from raftkv.errors import ConfigError
from raftkv.integrations.horovod import NO_SLOT, RESERVED, HorovodService, Scopes, Slot
from raftkv.pb import kv_pb2, rpc_pb2
from raftkv.rpc.server.http import HttpRequest, HttpResponse
from raftkv.server.http.routes import CHECKS
from raftkv.training.records import RUNNING, GenerationRecord, Member, RunKeys, State
from raftkv.training.rendezvous.world import placements, world_size

KEYS = RunKeys("job")
MEMBERS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4)), max_size=6)


class _Store:
    """What a member has applied: the two records of a run."""

    def __init__(self, current: bytes, state: bytes) -> None:
        self.values = {KEYS.round.encode(): current, KEYS.state.encode(): state}

    async def confirm(self, queue: object) -> None:
        pass

    def let_in(self, _call: object, **_keys: object) -> None:
        pass

    def find(self, request: rpc_pb2.RangeRequest) -> list[kv_pb2.KeyValue]:
        value = self.values.get(request.key)
        return [] if value is None else [kv_pb2.KeyValue(key=request.key, value=value, mod_revision=7)]


def slot(current: bytes, host: str, local_rank: int, state: bytes = State(7, RUNNING).encode()) -> Slot:
    store: Any = _Store(current, state)
    return asyncio.run(Scopes(store, "job").slot(None, host, local_rank))


@given(MEMBERS)
def test_every_slot_is_where_the_run_has_it(hosts: list[tuple[str, int]]) -> None:
    members = [Member(f"n{number}", host, slots=slots) for number, (host, slots) in enumerate(hosts)]
    current = GenerationRecord(7, tuple(members), time=1.5).encode()
    size = world_size(members)
    for place in placements(members):
        expected = (place.rank, size, place.local_rank, place.local_size, place.cross_rank, place.cross_size)
        assert slot(current, members[place.member].host, place.local_rank) == expected
    for host in "abcd":
        there = sum(slots for name, slots in hosts if name == host)
        assert slot(current, host, there) == NO_SLOT


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
        b'{"epoch":1,"members":[{"id":"a","host":1}]}',
        b'{"epoch":1,"members":[{"id":"a","host":"a","slots":-1}]}',
        b'{"epoch":1,"members":[{"id":"a","host":"a","slots":1.5}]}',
        b'{"epoch":1,"members":[{"id":"a","host":"a","slots":2000000}]}',
        b"[" * 100_000,
    ],
)
def test_invalid_round_is_refused(value: bytes) -> None:
    with pytest.raises(RecordError):
        slot(value, "a", 0)


@pytest.mark.parametrize("value", [b"", b"{}", b'{"epoch":1}', b'{"epoch":"1","phase":"running"}'])
def test_invalid_state_is_refused(value: bytes) -> None:
    with pytest.raises(RecordError):
        slot(GenerationRecord(7).encode(), "a", 0, value)


@pytest.mark.parametrize("run", ["a b", "/a", "a/", "a//b", "a\n", "x" * 201])
def test_the_flag_takes_run_ids_only(run: str) -> None:
    assert ServerConfig(horovod_run="team/job-1").horovod_run == "team/job-1"
    with pytest.raises(ConfigError, match=r"^--horovod-run .* is not a run id"):
        ServerConfig(horovod_run=run)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
@pytest.mark.parametrize("root", sorted(RESERVED))
def test_paths_of_the_member_are_no_keys(root: str, method: str) -> None:
    async def other(_request: HttpRequest) -> HttpResponse:
        return HttpResponse(404, b"the member's own")

    store: Any = _Store(b"", b"")
    service = HorovodService(Scopes(store, "job"), other)
    answer = asyncio.run(service.handle(HttpRequest(method, f"/{root}/name")))
    assert answer.body == b"the member's own"
    assert {path[1:] for path in CHECKS} <= RESERVED
