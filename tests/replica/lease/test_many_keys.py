"""Many concurrent calls for the keys of a lease with many keys: the keys are read when it is a call's turn."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from raftkv.loop.cork import Cork
from raftkv.loop.scheduler import LONG_ACTIVE_MAX, Slices
from raftkv.pb import rpc_pb2
from raftkv.rpc.server.calls import UnaryCall
from raftkv.server.streams.lease import LeaseService

CALLS = 40
KEYS = 12_000
LEASE = 7


class Attachments:
    """The keys of one lease, and how often they were copied."""

    def __init__(self) -> None:
        self._keys = [b"key/%d" % number for number in range(KEYS)]
        self.copies = 0

    def keys_unordered(self, lease_id: int) -> list[bytes]:
        assert lease_id == LEASE
        self.copies += 1
        return list(self._keys)

    def count(self, lease_id: int) -> int:
        assert lease_id == LEASE
        return KEYS


class Lessor:
    """Leads, while something is being applied in slices at first."""

    def __init__(self) -> None:
        self.is_whole = False

    async def time_to_live(self, request: rpc_pb2.LeaseTimeToLiveRequest, *, is_local: bool) -> Any:
        assert is_local
        return rpc_pb2.LeaseTimeToLiveResponse(ID=request.ID, TTL=5).SerializeToString

    def __getattr__(self, name: str) -> Any:
        return None


def service_of(attachments: Attachments, lessor: Lessor) -> LeaseService:
    responder: Any = SimpleNamespace(
        auth=SimpleNamespace(is_enabled=False),
        admission=SimpleNamespace(check_read=lambda call, serializable: None),
        applier=SimpleNamespace(store=SimpleNamespace(attachments=attachments)),
        slices=Slices(),
        revision=lambda: 1,
        node=SimpleNamespace(term=1),
        header=SimpleNamespace(encode=lambda revision, term: b""),
        present_header=lambda: b"",
    )
    return LeaseService(responder, cast(Any, lessor), cast(Any, None), Cork())


async def test_few_copies_of_the_keys_of_a_lease_are_there_at_a_time() -> None:
    attachments, lessor = Attachments(), Lessor()
    service = service_of(attachments, lessor)
    request = rpc_pb2.LeaseTimeToLiveRequest(ID=LEASE, keys=True)
    answered = 0

    async def ask() -> None:
        nonlocal answered
        pieces = await service.time_to_live(request, cast(UnaryCall, None))
        answered += 1
        assert attachments.copies - answered <= LONG_ACTIVE_MAX
        assert len(rpc_pb2.LeaseTimeToLiveResponse.FromString(b"".join(pieces)).keys) == KEYS

    calls = asyncio.gather(*[ask() for _ in range(CALLS)])
    for _ in range(10):
        await asyncio.sleep(0)
    assert attachments.copies == 0, "an entry is half applied"
    lessor.is_whole = True
    await calls
    assert 1 <= attachments.copies <= CALLS // LONG_ACTIVE_MAX, "those under way together share one list"
