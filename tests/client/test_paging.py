"""Long lists in pages limited by bytes: on a real member, and for pages too large for either end."""

from __future__ import annotations

import pytest

import raftkv
from raftkv.client.errors import ReceivedTooLarge, UnknownStatus
from raftkv.client.paging import FIRST_KEYS, PAGE_BYTES, read_pages
from raftkv.errors import RESOURCE_EXHAUSTED, ContextDeadlineExceededError, LimitedError, StatusError
from raftkv.pb import kv_pb2, rpc_pb2
from raftkv.rpc.server.budget import CONNECTION_FULL
from tests.procs import RAFTKV, Cluster

VALUE_BYTES = 1_000_000
KEYS = [b"k%04d" % number for number in range(900)]
FULL = UnknownStatus(RESOURCE_EXHAUSTED, CONNECTION_FULL)


class Member:
    """Keys of one size, and a limit on answers."""

    def __init__(self, room_bytes: int, error: StatusError) -> None:
        self.asked: list[int] = []
        self._room_bytes = room_bytes
        self._error = error

    async def range(self, request: rpc_pb2.RangeRequest) -> rpc_pb2.RangeResponse:
        """Answer, or refuse what is too large; sizes are those of values that are not made."""
        self.asked.append(request.limit)
        keys = [key for key in KEYS if key >= request.key]
        found = keys[: request.limit]
        if len(found) * VALUE_BYTES > self._room_bytes:
            raise self._error
        kvs = [kv_pb2.KeyValue(key=key, value=b"v" * (VALUE_BYTES // 1000)) for key in found]
        return rpc_pb2.RangeResponse(kvs=kvs, more=len(found) < len(keys))

    async def read(self) -> list[bytes]:
        """Read all keys."""
        pages = read_pages(self.range, rpc_pb2.RangeRequest(key=b"k", range_end=b"l"), 1000)
        return [pair.key async for page in pages for pair in page.kvs]


@pytest.mark.parametrize("error", [FULL, ReceivedTooLarge("grpc: received message larger than max")], ids=str)
@pytest.mark.parametrize("room_keys", [1, 5, 90, 250])
async def test_oversized_page_is_retried_with_fewer_keys(room_keys: int, error: StatusError) -> None:
    member = Member(room_keys * VALUE_BYTES, error)
    assert await member.read() == KEYS


@pytest.mark.parametrize("error", [FULL, ContextDeadlineExceededError(), LimitedError("alice", 100)], ids=str)
async def test_error_that_smaller_page_cannot_fix_is_raised(error: StatusError) -> None:
    member = Member(0, error)
    with pytest.raises(type(error)):
        await member.read()
    assert member.asked[-1] == (1 if error is FULL else FIRST_KEYS)


@pytest.mark.long
def test_large_values_come_in_pages_of_a_few_megabytes() -> None:
    """Pages were 1,000 keys of any size: values of 0.6 MB were more than a member sends at once."""
    with Cluster(RAFTKV) as cluster, raftkv.connect(cluster.endpoints[0]) as kv:
        for number in range(280):
            kv.put(f"k{number:03}", b"v" * 100_000)
        sizes = [sum(len(item.value) for item in page) for page in kv.pages("k", prefix=True)]
    assert sum(sizes) == 28_000_000
    assert max(sizes) <= 100_000 * FIRST_KEYS
    assert max(sizes[1:]) <= PAGE_BYTES
