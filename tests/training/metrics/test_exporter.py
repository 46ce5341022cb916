"""The exporter follows runs and checkpoints of a real cluster, by watch."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

import raftkv.aio
from raftkv.checkpoint.keys import AttemptId, RegistryKeys
from raftkv.checkpoint.records import AttemptRecord, Checkpoint, Latest
from raftkv.cli.runs import answer
from raftkv.client.operations import Delete, Put
from raftkv.errors import PermissionDeniedError
from raftkv.rpc.server.http import HttpRequest
from raftkv.training.metrics import Exporter
from raftkv.training.scheduling.admission import ClusterKeys, HostRecord
from tests.procs import Cluster
from tests.rpc.loop import until
from tests.training.scripted_run import GENERATION_2_RUNS, KEYS, SCRIPT, encoded

RUN = KEYS.run_id
CHECKPOINTS = RegistryKeys(RUN)
KIND = "files"
TIMEOUT_S = 90.0


def _value(exporter: Exporter, name: str) -> float | None:
    text = generate_latest(exporter.registry).decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and sample.labels.get("run", RUN) == RUN:
                return sample.value
    return None


def _head(number: int) -> str:
    return CHECKPOINTS.attempt(KIND, AttemptId(100, 1, number)).head


async def _write(kv: raftkv.aio.Client, first: int, end: int) -> None:
    for name, content in SCRIPT[first:end]:
        value = encoded(content)
        await (kv.delete(KEYS.base + name) if value is None else kv.put(KEYS.base + name, value))


async def _save(kv: raftkv.aio.Client) -> None:
    """One attempt that is committed, one that is given up."""
    for number in (1, 2):
        record = AttemptRecord(100, 1, number, KIND, 2, "memory://")
        await kv.put(_head(number), record.encode())
    checkpoint = Checkpoint(RUN, 100, 1, 1, KIND, 2, "memory://", "", "", 1, 640, time=1.0, duration_s=0.5)
    latest = Latest(100, 1, count=1, size_bytes=640, time=1.0)
    operations = (
        Delete(_head(1)),
        Put(CHECKPOINTS.record(KIND, 100), checkpoint.encode()),
        Put(CHECKPOINTS.latest(KIND), latest.encode()),
    )
    await kv.txn().then(*operations).commit()
    await kv.delete(_head(2))


async def _refused(kv: raftkv.aio.Client) -> list[str]:
    raise PermissionDeniedError


@pytest.mark.long
async def test_runs_and_checkpoints_are_followed(raftkv_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    async with asyncio.timeout(TIMEOUT_S), raftkv.aio.connect(raftkv_cluster.endpoints, timeout_s=TIMEOUT_S) as kv:
        await _write(kv, 0, GENERATION_2_RUNS)
        async with Exporter(kv) as exporter:
            await until(lambda: _value(exporter, "raftkv_run_generation") == 2)
            assert _value(exporter, "raftkv_run_world_size") == 2
            await _save(kv)
            await _write(kv, GENERATION_2_RUNS, len(SCRIPT))
            await until(lambda: _value(exporter, "raftkv_run_world_size") == 0)
            await exporter.look()
            await until(lambda: _value(exporter, "raftkv_checkpoint_commit_seconds_count") == 1)
            await until(lambda: _value(exporter, "raftkv_checkpoint_attempts_aborted_total") == 1)
            assert _value(exporter, "raftkv_checkpoint_last_step") == 100
            assert _value(exporter, "raftkv_run_exporter_errors_total") == 0
            # A user without the right to see clusters still sees runs; an unreadable value hides nothing else.
            monkeypatch.setattr("raftkv.training.metrics.list_clusters", _refused)
            await exporter.look()
            assert _value(exporter, "raftkv_run_exporter_errors_total") == 0
            await kv.put(CHECKPOINTS.latest("other"), b"junk")
            await until(lambda: _value(exporter, "raftkv_run_exporter_errors_total") == 1)
            assert _value(exporter, "raftkv_checkpoint_last_step") == 100
            response = await answer(exporter, HttpRequest("GET", "/metrics"))
            assert response.status == 200
            page = HttpRequest("GET", "/metrics", (("host", "evil.example:9379"),), loopback=True)
            assert (await answer(exporter, page)).status == 421  # whose owner lets the name lead here
            assert (await answer(exporter, HttpRequest("POST", "/metrics"))).status == 405
            assert (await answer(exporter, HttpRequest("GET", "/"))).status == 404
            await kv.delete(KEYS.base, prefix=True)
            await exporter.look()
            assert _value(exporter, "raftkv_run_generation") is None
            assert list(exporter._copies) == [RUN]  # its checkpoints are there
            await kv.delete("/raftkv/checkpoint/", prefix=True)
            await until(lambda: not exporter._latest.items)
            watchers = len(kv.scope.hub.watchers)
            await exporter.look()
            assert len(kv.scope.hub.watchers) == watchers - 2


async def test_what_one_user_writes_changes_no_metric_of_another(raftkv_cluster: Cluster) -> None:
    """A record speaks for its own key, and a ledger that cannot be read hides that of no other cluster."""
    async with asyncio.timeout(TIMEOUT_S), raftkv.aio.connect(raftkv_cluster.endpoints, timeout_s=TIMEOUT_S) as kv:
        await _save(kv)
        own = RegistryKeys("attacker")
        forged = Checkpoint(RUN, 900, 9, 9, KIND, 2, "memory://", "", "", 1, 7, time=1.0, duration_s=0.5)
        await kv.put(own.latest(KIND), Latest(1, 1, count=1).encode())
        await kv.put(own.record(KIND, 900), forged.encode())
        await kv.put(CHECKPOINTS.latest(f"x/{KIND}"), Latest(900, 9).encode())
        await kv.put(own.latest("planted"), Latest(1, 1).encode())
        await kv.put(own.attempt("planted", AttemptId(1, 1, 1)).head, b"")
        await kv.put(own.record("planted", 1), replace(forged, run_id="attacker", kind="planted", step=1).encode())
        await kv.put(ClusterKeys("broken").ledger, b"junk")
        await kv.put(f"{ClusterKeys('gpu').hosts}h1", HostRecord(8).encode())
        async with Exporter(kv) as exporter:
            await until(lambda: (_value(exporter, "raftkv_checkpoint_last_size_bytes") or 0) > 0)
            await until(lambda: _value(exporter, "raftkv_run_exporter_errors_total") == 2)
            assert _value(exporter, "raftkv_checkpoint_last_step") == 100
            assert _value(exporter, "raftkv_checkpoint_last_size_bytes") == 640
            assert _value(exporter, "raftkv_checkpoint_commit_seconds_count") == 1
            assert _value(exporter, "raftkv_run_cluster_slots") == 8
            assert b"planted" not in generate_latest(exporter.registry)
