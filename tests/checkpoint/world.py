"""A store in memory, directories in memory, and registries on both: what tests of checkpoints stand on.

world = World()
registry = world.registry()
await saved(registry, await registry.claim(), 100)
world.repeat_everything()                     # a late copy of every txn that was ever sent
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from raftkv.checkpoint.commit.attempt import Attempt, Means
from raftkv.checkpoint.commit.claim import Claim
from raftkv.checkpoint.commit.manifest import Manifest
from raftkv.checkpoint.digest import of_bytes
from raftkv.checkpoint.errors import FilesChanged
from raftkv.checkpoint.keys import RegistryKeys
from raftkv.checkpoint.records import Checkpoint, FileRecord, Reference
from raftkv.checkpoint.registry import Registry
from raftkv.client.operations import Delete, Put
from tests.virtual_store.direct import StoreWorld

RUN = "job"
KEYS = RegistryKeys(RUN)
KIND = "files"


class World(StoreWorld):
    """Put a registry on the store in memory.

    Attributes:
        files: manifests, by uri.
        lost: uris of attempts whose files were deleted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, bytes] = {}
        self.lost: set[str] = set()
        self.time_s = 1_800_000_000.0
        self.random = random.Random(7)

    def registry(self, run_id: str = RUN, *, seed: int = 0, lost: float = 0.0, uri: str | None = None) -> Registry:
        async def write_manifest(uri: str, data: bytes) -> None:
            await asyncio.sleep(0)
            self.files[uri] = data

        async def check_files(uri: str, manifest: Manifest) -> None:
            for rank, file in manifest.files:
                if uri in self.lost:
                    raise FilesChanged(uri, file.name, rank, "is not there any more")

        means = Means(self.control(seed, lost), write_manifest, check_files, lambda: self.time_s, self.random.randrange)
        return Registry.from_parts(means, run_id, uri=f"memory://{run_id}" if uri is None else uri)

    def put(self, key: str | bytes, value: bytes | str, *, leased: bool = False) -> None:
        """Write a key; ``leased``: as a living holder does."""
        self.store.txn((), [Put(key, value, self.store.grant(60.0) if leased else None)])

    def delete(self, key: str) -> None:
        self.store.txn((), [Delete(key)])

    def keys(self, prefix: str = "") -> list[str]:
        return [key.decode() for key in sorted(self.store.items) if key.startswith(prefix.encode())]

    def repeat_everything(self) -> None:
        """Let a copy of every txn arrive again, in the order in which they were sent."""
        for send in list(self.sent):
            send()


def play(story: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(story, 90))


def files_of(rank: int, *, text: str = "") -> list[FileRecord]:
    data = f"{text} of rank {rank}".encode()
    return [FileRecord(f"{rank}.bin", len(data), of_bytes(data))]


async def prepared(
    registry: Registry, claim: Claim, step: int, *, ranks: int = 2, but: Sequence[int] = (), **more: Any
) -> Attempt:
    """An attempt that ranks have prepared."""
    attempt = await registry.begin(claim, step, world_size=ranks, **more)
    for rank in range(ranks):
        if rank not in but:
            await attempt.prepare(rank, files_of(rank))
    return attempt


async def saved(
    registry: Registry,
    claim: Claim,
    step: int,
    metrics: Mapping[str, float] | None = None,
    *,
    ranks: int = 1,
    kind: str = KIND,
    parent: Reference | None = None,
) -> Checkpoint:
    """A checkpoint that is committed."""
    attempt = await prepared(registry, claim, step, ranks=ranks, kind=kind, parent=parent)
    return await attempt.commit(metrics=metrics)
