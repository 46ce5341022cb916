"""One process on one machine: a loop, a way to the cluster, a registry. What it does is in ``programs``.

Every txn that it sends may arrive again, much later: calls are repeated until they are answered, and the first of them
may have been held up anywhere.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from raftkv.checkpoint.commit.attempt import Means
from raftkv.checkpoint.commit.claim import Claim
from raftkv.checkpoint.commit.manifest import NAME as MANIFEST
from raftkv.checkpoint.commit.manifest import Manifest
from raftkv.checkpoint.errors import CheckpointError
from raftkv.checkpoint.records import CopyRecord
from raftkv.checkpoint.registry import Registry
from raftkv.checkpoint.retention import ownership
from raftkv.checkpoint.storage.place import Place
from raftkv.checkpoint.storage.verify import check_there
from raftkv.client.control import Interval
from raftkv.client.operations import Compare, Operation, mod_revision
from raftkv.client.values import KeyValue, TxnResult
from raftkv.errors import StatusError
from tests.virtual_loop import WALL_AT_START_S, NodeLoop
from tests.virtual_store.network import Link, SimControl

from .checker import ROUND
from .disk import Disk, SimPlace

if TYPE_CHECKING:
    from .run import Simulation

LATE_COPY_MAX_S = 12.0


class GenerationOver(CheckpointError):
    """The generation of the run has ended: what ``raftkv.training`` raises."""

    definite = True


@dataclass(frozen=True)
class SimFence:
    """The fence of a generation."""

    revision: int

    @property
    def conditions(self) -> tuple[Compare, ...]:
        return (mod_revision(ROUND) == self.revision,)

    @property
    def watched(self) -> Interval:
        return ROUND, ""

    def why_over(self, items: Mapping[bytes, KeyValue]) -> str | None:
        item = items.get(ROUND.encode())
        return None if item is not None and item.mod_revision == self.revision else "another has begun"

    def broken(self, reason: str = "") -> Exception:
        return GenerationOver(f"the generation that began at revision {self.revision} is over")


class ProcessControl(SimControl):
    """``Control`` whose txns say who has sent them, and arrive twice now and then."""

    def __init__(self, process: Process) -> None:
        super().__init__(process.link)
        self._process = process

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
    ) -> TxnResult:
        process, checker, link = self._process, self._process.simulation.checker, self._process.link

        def apply() -> TxnResult:
            checker.sender, checker.now = process, link.cluster.scheduler.now
            try:
                return link.cluster.store.txn(compares, then, otherwise)
            finally:
                checker.sender = None

        def copy() -> None:
            try:
                apply()
            except StatusError:
                pass  # the answer is lost

        if link.random.random() < process.simulation.settings.copies:
            link.cluster.scheduler.after(link.random.uniform(0.0, LATE_COPY_MAX_S), copy)
        result: TxnResult = await self._call("txn", apply)
        return result


class Process:
    """Run programs as one process that can die and freeze.

    Arguments:
        simulation: whose.
        name: for traces.
        run_id: whose checkpoints it works with.

    Attributes:
        claim: under which it writes; None: it has none yet.
        world_revision: of its generation.
    """

    def __init__(self, simulation: Simulation, name: str, run_id: str = "job") -> None:
        source = simulation.random
        self.simulation = simulation
        self.name = name
        offset_s = source.choice((-7200.0, -1.0, 0.0, 0.0, 5.0, 36_000.0))
        self.loop = NodeLoop(simulation.scheduler, offset_s, name)
        self.link = Link(self.loop, simulation.cluster, random.Random(source.random()), simulation.settings.weather)
        self.random = random.Random(source.random())
        self.claim: Claim | None = None
        self.world_revision = 0
        self.exited = False
        means = Means(
            ProcessControl(self),
            self._write_manifest,
            self._check_files,
            self._wall,
            self.random.randrange,
            leave_mark=ownership.leave_file,
            read_copy=self._read_copy,
        )
        self.registry = Registry.from_parts(means, run_id, uri=f"sim://{run_id}")
        simulation.processes.append(self)

    @property
    def alive(self) -> bool:
        """It is there, frozen or not."""
        return not self.loop.crashed and not self.exited

    @property
    def disk(self) -> Disk:
        """The bytes."""
        return self.simulation.disk

    def say(self, text: str) -> None:
        self.simulation.say(f"{self.name} {text}")

    def start(self, program: Callable[[Process], Coroutine[Any, Any, None]]) -> Process:
        """Run a program."""
        self.say("comes")
        self.loop.create_task(self._run(program))
        return self

    async def _run(self, program: Callable[[Process], Coroutine[Any, Any, None]]) -> None:
        try:
            await program(self)
        except (CheckpointError, StatusError, TimeoutError) as error:
            self.say(f"ends: {type(error).__name__}: {error}")
        except Exception as error:
            self.simulation.checker.fail("P0", f"{self.name} raises {error!r}")
        self.exited = True

    def kill(self) -> None:
        """It is gone; the kernel closes its connections."""
        if self.alive:
            self.say("is killed")
            self.loop.crash()
            self.link.hang_up()

    async def pause(self, low_s: float, high_s: float) -> None:
        """Do something else for a while."""
        await asyncio.sleep(self.random.uniform(low_s, high_s))

    async def write(self, path: str, data: bytes) -> None:
        """Write a file in pieces: a crash leaves some of them."""
        for piece in range(1, 4):
            await self.pause(0.0, self.simulation.settings.write_s)
            self.disk.write(path, data[: len(data) * piece // 3])

    async def _write_manifest(self, uri: str, data: bytes) -> None:
        await self.pause(0.0, self.simulation.settings.write_s)
        self.disk.write(f"{uri}/{MANIFEST}", data)

    async def _check_files(self, uri: str, manifest: Manifest) -> None:
        await self.pause(0.0, self.simulation.settings.write_s)
        check_there(cast(Place, SimPlace(uri)), manifest)

    async def _read_copy(self, copy: CopyRecord, size_bytes: int) -> memoryview:
        return await self.simulation.lend(self, copy, size_bytes)

    def _wall(self) -> float:
        return WALL_AT_START_S + self.loop.time()
