"""A registry on the store in memory with files in memory, and what tests put there.

world = Kept(tmp_path)
await world.save(100, {"loss": 0.5})
await world.collect(Policy(keep_last=1))
world.steps(), world.directories()
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raftkv.checkpoint.commit.attempt import Attempt, Means
from raftkv.checkpoint.commit.claim import Claim
from raftkv.checkpoint.keys import FILES, RegistryKeys
from raftkv.checkpoint.records import Checkpoint, FileRecord, Latest, Reference
from raftkv.checkpoint.registry import Registry, check_files, write_manifest
from raftkv.checkpoint.retention import ownership
from raftkv.checkpoint.retention.collector import NO_POLICY, Collected
from raftkv.checkpoint.retention.policy import Policy
from raftkv.checkpoint.storage.place import Place
from tests.checkpoint.world import KEYS, RUN, World

FILE_BYTES = 1000


class Kept(World):
    """Stand in for what is kept.

    Attributes:
        uri: of the place.
    """

    def __init__(self, path: Path, scheme: str = "memory://") -> None:
        super().__init__()
        self.uri = f"{scheme}{path}/{RUN}"
        self._claims: dict[str, Claim] = {}

    def registry(self, run_id: str = RUN, *, seed: int = 0, lost: float = 0.0, control: Any = None) -> Registry:
        means = Means(
            control or self.control(seed, lost), write_manifest, check_files, lambda: self.time_s,
            self.random.randrange, leave_mark=ownership.leave_file,
        )  # fmt: skip
        return Registry.from_parts(means, run_id, uri=self.uri.removesuffix(RUN) + run_id)

    async def begin(
        self, step: int, *, run_id: str = RUN, kind: str = FILES, **more: Any
    ) -> tuple[Attempt, FileRecord]:
        """An attempt of one rank, whose file is written."""
        registry = self.registry(run_id)
        if run_id not in self._claims:
            self._claims[run_id] = await registry.claim()
        attempt = await registry.begin(self._claims[run_id], step, kind=kind, **more)
        self.time_s += 60
        return attempt, Place(attempt.uri).write("sub/a.bin", bytes([step % 256]) * FILE_BYTES)

    async def save(
        self,
        step: int,
        metrics: Mapping[str, float] | None = None,
        *,
        run_id: str = RUN,
        kind: str = FILES,
        parent: Reference | None = None,
    ) -> Checkpoint:
        """A checkpoint of one file, a minute after the one before."""
        attempt, file = await self.begin(step, run_id=run_id, kind=kind, parent=parent)
        await attempt.prepare(0, [file])
        return await attempt.commit(metrics=metrics)

    async def next_generation(self) -> None:
        """Another program claims the run, and decides what was left."""
        registry = self.registry()
        self._claims[RUN] = await registry.claim()
        await registry.take_over(self._claims[RUN])

    async def collect(self, policy: Policy = NO_POLICY, *, control: Any = None, dry_run: bool = False) -> Collected:
        return await self.registry(control=control).collect(policy, dry_run=dry_run)

    def steps(self, kind: str = FILES) -> list[int]:
        """Steps that have a record."""
        return [int(key.rpartition("/")[2]) for key in self.keys(KEYS.records_of(kind))]

    def directories(self) -> list[str]:
        """Directories of checkpoints, in the place."""
        return [name for name in Place(self.uri).names() if name.startswith("step-")]

    def latest(self, kind: str = FILES, run_id: str = RUN) -> Latest:
        return Latest.decode(self.store.items[RegistryKeys(run_id).latest(kind).encode()].value)
