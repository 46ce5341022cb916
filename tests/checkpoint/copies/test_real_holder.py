"""A holder in a process of its own, over real servers, of raftkv and of etcd: killed, it takes its copies along."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from raftkv.aio import connect
from raftkv.checkpoint.copies import transfer
from raftkv.checkpoint.digest import of_bytes
from raftkv.checkpoint.errors import StorageError
from raftkv.checkpoint.keys import MEMORY
from raftkv.checkpoint.records import FileRecord
from raftkv.checkpoint.registry import Registry
from tests.long import long_except
from tests.procs import ETCD_FAST, RAFTKV, Cluster

ROOT = Path(__file__).resolve().parents[3]
TTL_S = 5
HOLDER = """
import asyncio, sys
from raftkv.aio import connect
from raftkv.checkpoint.copies.holder import Holder, Me
from raftkv.client.control import ClientControl

async def main():
    async with connect(sys.argv[1].split(",")) as kv:
        me = Me(sys.argv[2], sys.argv[2], topology=sys.argv[3])
        async with Holder(ClientControl(kv), "job", me, limit_bytes=1 << 26, ttl_s=int(sys.argv[4])):
            print("ready", flush=True)
            await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture(params=long_except([ETCD_FAST, RAFTKV], [RAFTKV]), ids=["etcd", "raftkv"])
def member(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with Cluster(request.param) as cluster:
        yield cluster


def start(member: Cluster, name: str, topology: str) -> subprocess.Popen[str]:
    arguments = [",".join(member.endpoints), name, topology, str(TTL_S)]
    return subprocess.Popen([sys.executable, "-c", HOLDER, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.long
async def test_copies_of_a_killed_holder_are_gone_and_those_of_another_are_read(member: Cluster) -> None:
    data = b"state of rank 0, " * 100_000
    holders = [start(member, name, f"row1/{name}") for name in ("a", "b")]
    try:
        assert [process.stdout and process.stdout.readline() for process in holders] == ["ready\n"] * 2
        async with connect(member.endpoints) as kv:
            registry = Registry(kv, "job")
            attempt = await registry.begin(await registry.claim(), 10, kind=MEMORY)
            record = attempt.record
            copy = {
                "kind": MEMORY, "step": 10, "generation": record.generation, "number": record.number,
                "file": "rank-0", "digest": of_bytes(data), "size_bytes": len(data),
            }  # fmt: skip
            copy["secret"] = await attempt.offer(FileRecord("rank-0", len(data), of_bytes(data)))
            for holder in await registry.holders():
                await asyncio.to_thread(transfer.send, holder, copy, [memoryview(data)])
            await attempt.prepare(0, [FileRecord("rank-0", len(data), of_bytes(data))])
            checkpoint = await attempt.commit()
            found = await registry.nearest(10, "rank-0", to="a", topology="row1/a")
            assert [(each.distance, each.record and each.record.host) for each in found] == [(0, "a"), (2, "b")]
            watch = kv.watch(registry.keys.copies_at(MEMORY, 10), prefix=True, no_put=True)
            await watch.ready()
            holders[0].kill()
            assert bytes(await registry.fetch(checkpoint, "rank-0", to="a")) == data  # its key may be there still
            assert (await anext(watch)).key.endswith(b"/a")
            assert [each.record and each.record.host for each in await registry.nearest(10, "rank-0")] == ["b"]
            assert bytes(await registry.fetch(checkpoint, "rank-0", to="a")) == data
            holders[1].kill()
            with pytest.raises(StorageError, match="no copy of rank-0 can be read"):
                await registry.fetch(checkpoint, "rank-0")
    finally:
        for process in holders:
            process.kill()
            process.communicate()
