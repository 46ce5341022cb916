"""The registry on real servers: everything that it asks of a store, of raftkv and of etcd 3.5.1 alike."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import raftkv
from raftkv.aio import Client, connect
from raftkv.checkpoint.commit.claim import Claim
from raftkv.checkpoint.commit.summary import METRICS_MAX
from raftkv.checkpoint.errors import AttemptOver, CheckpointNotFound, FenceBroken
from raftkv.checkpoint.find import MAX
from raftkv.checkpoint.records import FileRecord
from raftkv.checkpoint.registry import Registry
from raftkv.checkpoint.retention.policy import Policy
from raftkv.checkpoint.storage.place import Place
from raftkv.client.operations import get_range
from raftkv.errors import ConfigError
from tests.checkpoint.world import KIND
from tests.long import long_except
from tests.procs import ETCD_FAST, RAFTKV, Cluster


@pytest.fixture(scope="module", params=long_except([ETCD_FAST, RAFTKV], [RAFTKV]), ids=["etcd", "raftkv"])
def member(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with Cluster(request.param) as cluster:
        yield cluster


@pytest.fixture
@asynccontextmanager
async def kv(member: Cluster) -> AsyncIterator[Client]:
    async with connect(member.endpoints) as client:
        yield client


def files_at(uri: str, rank: int) -> list[FileRecord]:
    return [Place(uri).write(f"{rank}.bin", f"{uri} of rank {rank}".encode())]


async def saved(registry: Registry, claim: Claim, step: int, ranks: int = 1, **more: Any) -> Any:
    attempt = await registry.begin(claim, step, world_size=ranks)
    for rank in range(ranks):
        await attempt.prepare(rank, files_at(attempt.uri, rank))
    return await attempt.commit(**more)


@pytest.mark.long
async def test_the_life_of_a_run(kv: Client, tmp_path: Path) -> None:
    """Claims, two phases, takeover, metrics up to what a txn admits, lookups, the watch, pins, tags, collection."""
    registry = Registry(kv, "team/job", uri=str(tmp_path))
    everything = registry.watch(start_revision=1)
    old = await registry.claim()
    attempt = await registry.begin(old, 100, world_size=3)
    joined = await registry.join(old, 100, timeout_s=10.0)
    waiting = asyncio.create_task(joined.outcome(30.0))
    for rank in range(3):
        await attempt.prepare(rank, files_at(attempt.uri, rank))
    many = {f"eval/{number}": float(number) for number in range(METRICS_MAX)}
    assert await attempt.commit(metrics=many) == await waiting
    await registry.set_metrics(100, KIND, {name: -value for name, value in many.items()})
    whole = await registry.begin(old, 200, world_size=2)
    for rank in range(2):
        await whole.prepare(rank, files_at(whole.uri, rank))
    torn = await registry.begin(old, 300, world_size=2)
    await torn.prepare(1, files_at(torn.uri, 1))
    new = await registry.claim()
    taken = await registry.take_over(new)
    assert [each.checkpoint is not None for each in taken] == [True, False]
    for refused in (torn.prepare(0, ()), torn.commit(), registry.begin(old, 400), registry.take_over(old)):
        with pytest.raises(FenceBroken):
            await refused
    aborted = await registry.begin(new, 350)
    assert await aborted.abort("the disk is full")
    with pytest.raises(AttemptOver):
        await aborted.prepare(0, ())
    last = await saved(registry, new, 400, metrics={"eval/7": 3.0})
    assert (await registry.best("eval/7", MAX)).step == 400
    assert (await registry.best("eval/7")).step == 100
    assert [each.step for each in await registry.checkpoints(newest_first=True, limit=2)] == [400, 200]
    await registry.tag("release", await registry.at(200))
    async with registry.pin(await registry.at(100), "reader"):
        await registry.collect(Policy(keep_last=1))
        assert [each.step for each in await registry.checkpoints()] == [100, 200, 400]
    await registry.collect(Policy(keep_last=1))
    assert [each.step for each in await registry.checkpoints()] == [200, 400]
    assert (await registry.best("eval/7")).step == 400
    assert await registry.latest() == last
    assert [(await anext(everything)).checkpoint.step for _ in range(3)] == [100, 200, 400]
    everything.cancel()
    kept = sorted(Path(each.uri).name for each in await registry.checkpoints())
    assert [name for name in Place(str(tmp_path)).names() if name.startswith("step-")] == kept
    left = await registry.control.txn((), [get_range(registry.keys.base, prefix=True, keys_only=True)])
    kinds = {item.key.split(b"/")[5] for item in left.results[0]}
    assert kinds == {b"fence", b"begun", b"mark", b"record", b"metric", b"tag", b"hold"}


@pytest.mark.long
async def test_a_thousand_ranks_and_more_checkpoints_than_a_txn_may_read(kv: Client, tmp_path: Path) -> None:
    registry = Registry(kv, "wide", uri=str(tmp_path))
    claim = await registry.claim()
    attempt = await registry.begin(claim, 1, world_size=1000)
    first = files_at(attempt.uri, 0)[0]
    files = [replace(first, name=f"{rank}.bin") for rank in range(1000)]
    for file in files[1:]:
        shutil.copy(Path(attempt.uri, first.name), Path(attempt.uri, file.name))
    await asyncio.gather(*(attempt.prepare(rank, [file]) for rank, file in enumerate(files)))
    committed = await attempt.commit(timeout_s=30.0)
    assert (committed.world_size, committed.file_count) == (1000, 1000)
    for step in range(2, 132):
        each = await registry.begin(claim, step)
        await each.prepare(0, ())
        await each.commit(metrics={"loss": 1.0})
    assert len(await registry.lookup.best("wide", "loss", MAX, count=130)) == 130


async def test_history_that_is_compacted_ends_no_watch(kv: Client, tmp_path: Path) -> None:
    registry = Registry(kv, "compacted", uri=str(tmp_path))
    claim = await registry.claim()
    first = await saved(registry, claim, 1)
    await saved(registry, claim, 2)
    await kv.compact((await kv.put("x", b"")).revision)
    commits = registry.watch(start_revision=2)
    assert [(await anext(commits)).checkpoint.step for _ in range(2)] == [1, 2]
    await registry.set_metrics(1, KIND, {"loss": 1.0})
    await saved(registry, claim, 3, metrics={"loss": 2.0})
    assert (await anext(commits)).checkpoint.step == 3
    commits.cancel()
    assert (await registry.at(1)).uri == first.uri


def test_a_program_without_a_loop(member: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with raftkv.connect(member.endpoints) as kv:
        registry = raftkv.checkpoint.Registry(kv, "blocking", uri=str(tmp_path))
        claim = registry.claim()
        assert registry.take_over(claim) == []
        attempt = registry.begin(claim, 7)
        attempt.prepare(0, files_at(attempt.uri, 0))
        checkpoint = attempt.commit()
        assert registry.set_metrics(7, KIND, {"loss": 0.5}).metrics == {"loss": 0.5}
        assert registry.lineage(registry.latest()) == [registry.at(7)]
        assert "blocking" in {found.run_id for found in registry.runs()}
        with pytest.raises(CheckpointNotFound):
            registry.set_metrics(8, KIND, {"loss": 0.5})
        with registry.watch(start_revision=1) as commits:
            assert next(commits).checkpoint.id == checkpoint.id
        registry.watch()  # and the client is closed during a watch
    assert caplog.text == ""


async def test_a_registry_has_a_client_of_all_keys(kv: Client, member: Cluster) -> None:
    for narrow in (kv.view("team/"), connect(member.endpoints, namespace="team/")):
        with pytest.raises(ConfigError, match="kv sees the keys below 'team/' alone; give the client that connect"):
            Registry(narrow, "job")
