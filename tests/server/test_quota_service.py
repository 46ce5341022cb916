"""Quotas that are set by the dozen: the entries that count their keys."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raftkv.apply.quotas import COUNT_ON
from raftkv.apply.txn import LONG_WORK
from raftkv.pb import admin_pb2
from raftkv.replica.node.proposals import KEY_COST_BYTES, PACE_MIN_BYTES
from raftkv.server.maintenance.quotas import QuotaService
from tests.rpc.loop import until
from tests.server.auth.members import Members

PARTS = 5
"""Entries that count a prefix."""


class Responder:
    """Applies each entry two turns of the loop after it was proposed."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}
        self.left: dict[bytes, int] = {}
        self.counting = self.counting_max = 0
        self.works: list[int] = []
        self.applier = SimpleNamespace(quotas=SimpleNamespace(is_counting=lambda prefix: self.left[prefix] > 0))

    def serve(self, _server: object, method: Any, handler: Any, *, confirms: bool = False) -> None:
        self.handlers[method.path.rpartition("/")[2]] = handler

    def present_header(self) -> bytes:
        return b""

    async def propose_versioned(self, _kind: int, request: Any, _caller: Any, _identity: Any, work: int = 0) -> Any:
        self.works.append(work)
        is_count = request.bytes_max == COUNT_ON
        self.counting += is_count
        self.counting_max = max(self.counting_max, self.counting)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self.counting -= is_count
        self.left[request.prefix] = self.left[request.prefix] - 1 if is_count else PARTS
        return SimpleNamespace(body=b"")


async def test_one_entry_counts_at_a_time_however_many_quotas_are_set() -> None:
    """Each call began a count of its own: eight callers kept all members from applying puts for 7 s."""
    responder = Responder()
    QuotaService(cast(Any, responder)).register(cast(Any, None))
    call = SimpleNamespace(caller=None, identity="address 10.0.0.1")

    async def set_(number: int) -> None:
        await responder.handlers["QuotaSet"](admin_pb2.QuotaSetRequest(prefix=b"p%d" % number, bytes_max=1), call)

    await asyncio.gather(*[set_(number % 4) for number in range(40)])
    await until(lambda: not any(responder.left.values()))
    await set_(9)
    await until(lambda: not any(responder.left.values()))
    assert responder.counting_max == 1
    assert all(PACE_MIN_BYTES / KEY_COST_BYTES < work < LONG_WORK for work in responder.works)


@pytest.mark.interpreted
def test_a_weight_reaches_the_queues_of_every_member() -> None:
    world = Members(3)
    for weight in (300, 0):
        limit = admin_pb2.Limit(kind="user", name=b"alice", weight=weight)
        world.start("raftkvpb.Admin/LimitSet", admin_pb2.LimitSetRequest(limit=limit), at=1)
        world.wait(0.1)
        assert [member.node.uses.weights for member in world.members] == [{b"alice": 3.0} if weight else {}] * 3
    world.close()
