"""A real one-member cluster for scripted clients, whose operations are recorded, read back and checked as in a run."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from jepsen.client import Client, Gate
from jepsen.db import Cluster, Member, Settings
from jepsen.history import History, Recorder
from jepsen.ops import Range, RangeResult
from jepsen.probe import Probe
from jepsen.store_reader import StoreReader

READY_S = 90.0
POLL_S = 0.02


@dataclass(slots=True)
class Stage:
    """A cluster and the recorder of its clients."""

    cluster: Cluster
    probe: Probe
    recorder: Recorder
    gate: Gate

    @property
    def members(self) -> list[Member]:
        """The cluster's members, for watchers."""
        return self.cluster.members

    def client(self, name: str) -> Client:
        """Return a client of the first member."""
        return Client(name, self.members[:1], self.recorder, self.gate, 10.0, random.Random(name))

    async def wait_gone(self, client: Client, key: str) -> None:
        """Wait until a key is deleted."""
        async with asyncio.timeout(READY_S):
            while True:
                result = (await client.call(Range(key))).result
                if isinstance(result, RangeResult) and not result.kvs:
                    return
                await asyncio.sleep(POLL_S)

    async def history(self) -> History:
        """Return the history so far, with the store read back."""
        reader = StoreReader(self.probe)
        await reader.read_up_to(await self.probe.revision(), self.recorder.operations)
        return History(self.recorder.operations, self.recorder.events, reader.record, self.recorder.streams)


@contextlib.asynccontextmanager
async def staged(system: str, folder: Path) -> AsyncIterator[Stage]:
    """Start one healthy member of a system that allows short leases."""
    cluster = Cluster(folder / "stage", Settings(system=system, size=1, heartbeat_ms=20, election_ms=200))
    probe, gate = Probe(cluster), Gate()
    gate.open()
    try:
        cluster.start(cluster.members)
        if not await probe.wait_healthy(READY_S):
            raise TimeoutError("the member does not come up")
        yield Stage(cluster, probe, Recorder(), gate)
    finally:
        await probe.close()
        cluster.close()
