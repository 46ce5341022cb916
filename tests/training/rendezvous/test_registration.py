"""A node's registration, with the store stood in for."""

from __future__ import annotations

import asyncio

from raftkv.client.operations import Get, Put
from raftkv.training.config import RunConfig
from raftkv.training.records import HEARTBEAT_LOST, PARTITION, Fault, Node, RunKeys
from raftkv.training.rendezvous.registration import Registration
from tests.virtual_store.direct import StoreWorld

CONFIG = RunConfig(run_id="job", lease_ttl_s=10).checked()


def cause_of_a_loss(beats_since: int) -> str:
    """What a node writes of the loss of its lease, so many beats after one that came a minute late."""

    async def main() -> str:
        control = StoreWorld().control()
        node, key = Node("a-1", "a"), f"{RunKeys('job').faults(1)}a-1"
        calls = {"on_registered": lambda _: None, "on_lost": lambda: None, "on_outage": lambda: None}
        registration = Registration(control, CONFIG, node, **calls)
        await registration.open()
        registration.starts(1)
        registration._beat_at -= 60.0
        registration._beat()
        for _ in range(beats_since):
            registration._beat_at -= 5.0
            registration._beat()
        noted = Fault(1, "a-1", "a", cause=HEARTBEAT_LOST, message="noted by the arbiter")
        await control.txn((), [Put(key, noted.encode())])
        assert registration.grant is not None
        registration.lose(registration.grant.id)
        while True:
            fault = Fault.decode((await control.txn((), [Get(key)])).results[0].value)
            if fault != noted:
                await registration.leave()
                return fault.cause

    return asyncio.run(main())


def test_a_lease_that_outlived_a_standstill_did_not_end_by_it() -> None:
    assert cause_of_a_loss(0) == HEARTBEAT_LOST
    assert cause_of_a_loss(1) == PARTITION
