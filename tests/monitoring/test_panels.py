"""Dashboards and rules beside real Prometheus, members and runs: no panel is empty, no rule names what is not there."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import raftkv.aio
from deploy.grafana.generate import HERE, dashboards, written
from raftkv.checkpoint.keys import AttemptId, RegistryKeys
from raftkv.checkpoint.records import AttemptRecord, Checkpoint, Latest
from raftkv.pb import rpc_pb2
from raftkv.training.scheduling.admission import Claim, ClusterKeys, Ledger, Need
from tests import installed
from tests.compat.wire import Wire
from tests.monitoring.expressions import configuration, in_grafana, labels_of, named, panels, rules
from tests.procs import RAFTKV, ROOT, Cluster, free_port, http_get, wait_for
from tests.training.scripted_run import GENERATION_2_RUNS, KEYS, SCRIPT, encoded

FLAGS = ("--metrics=extensive", "--audit-log=stderr", "--wal-archive-dir=archive")
ELSEWHERE = {"raftkv_certificate_expires_seconds": frozenset({"port", "use"})}
"""Only there under TLS: ``tests/server/tls/test_context.py``."""

OF_PROMETHEUS = frozenset({"job", "instance"})


def test_dashboards_are_what_the_program_writes() -> None:
    for name, content in dashboards().items():
        assert (HERE / name).read_text(encoding="utf-8") == written(content), "run python deploy/grafana/generate.py"
    assert {path.name for path in HERE.glob("*.json")} == dashboards().keys()


def test_panels_do_not_overlap() -> None:
    for content in dashboards().values():
        places = [panel["gridPos"] for panel in content["panels"]]
        cells = [
            (x, y)
            for place in places
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ]
        assert len(cells) == len(set(cells))
        assert max(x for x, _ in cells) < 24


def test_metrics_in_queries_are_found() -> None:
    query = (
        'sum by (le) (rate(etcd_a_bucket{job="x",To=~"y"}[5m])) / job:etcd_b:rate5m{job="x"} > up and on (run) grpc_c'
    )
    assert named(query) == {("etcd_a_bucket", frozenset({"job", "To"})), ("up", frozenset()), ("grpc_c", frozenset())}
    assert len(list(panels())) > 70
    assert labels_of("all {{run}} {{kind}}") == {"run", "kind"}


async def _train(endpoints: list[str]) -> None:
    """Write what two runs, one of which waits for slots, and a saver of checkpoints would have written."""
    async with raftkv.aio.connect(endpoints) as kv:
        for name, content in SCRIPT[:GENERATION_2_RUNS]:
            value = encoded(content)
            await (kv.delete(KEYS.base + name) if value is None else kv.put(KEYS.base + name, value))
        claims = tuple(
            Claim(run, number, nodes=(Need(f"{run}-1", "h1", 8),), granted=granted)
            for number, (run, granted) in enumerate({KEYS.run_id: (f"{KEYS.run_id}-1",), "late": ()}.items())
        )
        await kv.put(ClusterKeys("gpu").ledger, Ledger(claims=claims).encode())
        await kv.put("/raftkv/train-cluster/gpu/host/h1", b'{"slots": 8}')
        keys = RegistryKeys(KEYS.run_id)
        attempt = AttemptRecord(100, 1, 1, "files", 2, "memory://")
        await kv.put(keys.attempt("files", AttemptId(100, 1, 1)).head, attempt.encode())
        checkpoint = Checkpoint(
            KEYS.run_id, 90, 1, 1, "files", 2, "memory://", "", "", 1, 640, time=1.0, duration_s=1.0
        )
        await kv.put(keys.record("files", 90), checkpoint.encode())
        await kv.put(keys.latest("files"), Latest(90, 1, count=1, size_bytes=640, time=1.0).encode())


def _use(endpoints: list[str]) -> None:
    """Give members something to count."""
    with Wire(endpoints) as wire:
        wire.call("etcdserverpb.KV/Put", rpc_pb2.PutRequest(key=b"a"))
        wire.call("etcdserverpb.KV/Range", rpc_pb2.RangeRequest(key=b"a"))


def _raise_alarm(endpoints: list[str]) -> None:
    alarm = rpc_pb2.AlarmRequest(action=rpc_pb2.AlarmRequest.ACTIVATE, memberID=1, alarm=rpc_pb2.NOSPACE)
    with Wire(endpoints) as wire:
        wire.call("etcdserverpb.Maintenance/Alarm", alarm)


@contextmanager
def _running(*command: str, directory: Path) -> Iterator[None]:
    with (directory / "log").open("ab") as log:
        process = subprocess.Popen(command, cwd=directory, stdout=log, stderr=log, env={"PYTHONPATH": str(ROOT)})
        try:
            yield
        except BaseException as error:
            error.add_note((directory / "log").read_text(errors="replace")[-3000:])
            raise
        finally:
            process.terminate()
            process.wait()


def _is_there(address: str, path: str) -> bool:
    try:
        return http_get(address, path)[0] == 200
    except OSError:
        return False


def _ask(address: str, expression: str) -> list[Any]:
    query = urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(f"http://{address}/api/v1/query?{query}", timeout=30) as answer:
        found: list[Any] = json.load(answer)["data"]["result"]
        return found


def _labels(texts: list[str]) -> dict[str, set[str]]:
    """Labels of each series' name."""
    labels: dict[str, set[str]] = {"up": set()}
    for text in texts:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


@pytest.mark.long
def test_no_panel_is_empty_and_no_rule_names_what_is_not_there(tmp_path: Path) -> None:
    prometheus = installed.program("prometheus")
    runs, server = (f"127.0.0.1:{free_port()}" for _ in range(2))
    with Cluster(RAFTKV, size=3, flags=FLAGS) as cluster:
        endpoints = cluster.endpoints
        asyncio.run(_train(endpoints))
        ctl = (sys.executable, "-m", "raftkv.cli.ctl", "--endpoints", ",".join(endpoints))
        subprocess.run([*ctl, "quota", "set", "a", "--bytes=1000"], check=True, cwd=ROOT, capture_output=True)
        path = configuration(tmp_path, endpoints, runs)
        options = (f"--config.file={path}", f"--web.listen-address={server}", f"--storage.tsdb.path={tmp_path}/data")
        exporter = _running(*ctl, "run", "metrics", f"--listen={runs}", directory=tmp_path)
        with exporter, _running(prometheus, *options, directory=tmp_path):
            wait_for(lambda: _is_there(runs, "/health") and _is_there(server, "/-/ready"), "Prometheus")
            empty = dict(panels())

            def fill() -> bool:
                _use(endpoints)
                for title, expression in list(empty.items()):
                    if found := _ask(server, in_grafana(expression)):
                        assert labels_of(title) <= found[0]["metric"].keys(), title
                        del empty[title]
                return not empty

            try:
                wait_for(fill, "series for all panels", 120)
            finally:
                assert empty == {}
            _raise_alarm(endpoints)
            texts = [http_get(address, "/metrics")[2] for address in (endpoints[0], runs)]
    check = subprocess.run(
        [installed.program("promtool"), "check", "metrics"], input=texts[1], text=True, capture_output=True, check=False
    )
    assert check.stderr == "", "of the exporter; tests/compat/rows/test_metrics.py asks for those of a member"
    labels = _labels(texts) | ELSEWHERE
    wrong = {
        title: (name, asked - labels.get(name, set()))
        for title, expression in (*panels(), *rules())
        for name, asked in named(expression)
        if name not in labels or asked - labels[name] - OF_PROMETHEUS
    }
    assert wrong == {}
