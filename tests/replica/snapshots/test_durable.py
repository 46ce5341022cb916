"""A caller that waits for writes to reach the database gets an error when the disk is full."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from raftkv.errors import RESOURCE_EXHAUSTED, UnwrittenError
from raftkv.replica.maintenance.hashes import Hashes
from raftkv.replica.node.bootstrap import open_writer
from raftkv.replica.snapshots.files import flushed
from raftkv.rpc.server.stream import StreamCall
from raftkv.rpc.status import RpcError
from raftkv.server.maintenance.snapshot import SnapshotService
from raftkv.storage.backend.lmdb import LMDBBackend
from raftkv.storage.failpoints import arm, disarm_all
from raftkv.storage.mvcc import Store
from tests.server.test_snapshot_service import Call

PATIENCE_S = 90.0


async def test_a_report_of_the_database_that_fails_is_a_failure_of_the_member() -> None:
    failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    writer = open_writer(asyncio.get_running_loop(), failed.set_result)

    def fail(error: Exception | None) -> None:
        raise ValueError(f"no member knows {error}")

    writer.submit(lambda: None, fail)
    assert str(await asyncio.wait_for(failed, PATIENCE_S)) == "no member knows None"
    writer.close()


class Full:
    """A store with a change that its disk has no room for."""

    def __init__(self, path: Path) -> None:
        self.backend = LMDBBackend(path, 64 << 20)
        self.store = Store.open(self.backend)
        arm("beforeCommit", "error(ENOSPC)")
        txn = self.store.begin()
        txn.put(b"k", b"v")
        txn.end()
        self.store.set_applied(1, 1)

    async def snapshot(self) -> None:
        await SnapshotService(self.store, self.backend).snapshot(cast(StreamCall, Call()))

    async def hash(self) -> None:
        await Hashes(self.store, 1, pytest.fail).at(0)

    async def keep_hash(self) -> None:
        self.store.compact(2)
        self.store.set_applied(2, 1)
        await Hashes(self.store, 1, pytest.fail).keep()


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Full]:
    full = Full(tmp_path / "db")
    yield full
    disarm_all()
    full.store.close()
    full.backend.close()


def _run(awaited: Awaitable[None]) -> None:
    async def run() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await awaited

    asyncio.run(run())


@pytest.mark.parametrize("ask", [Full.snapshot, Full.hash])
def test_a_full_disk_is_said(full: Full, ask: Callable[[Full], Awaitable[None]]) -> None:
    with pytest.raises((UnwrittenError, RpcError), match="the disk has no room for what was written before") as refused:
        _run(ask(full))
    assert refused.value.code == RESOURCE_EXHAUSTED


def test_an_unrequested_hash_is_left_out(full: Full) -> None:
    _run(full.keep_hash())


def test_a_disk_that_has_room_again_is_waited_for(full: Full) -> None:
    full.store.commit()
    assert full.store.space_error is not None
    disarm_all()
    _run(flushed(full.store))
    assert full.store.durable_index == 1
