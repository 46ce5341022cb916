"""Settings seen from outside one running member: compaction by the clock, hosts, origins, sockets."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator

import pytest

import raftkv
from raftkv.pb import rpc_pb2
from tests.cli.runner import run_ctl
from tests.compat.wire import Wire
from tests.procs import RAFTKV, Cluster, free_port, wait_for
from tests.server.process.process import RANGE, must_put, value_of

METRICS_PORT = free_port()
FLAGS = ["--auto-compaction-retention=1s", "--host-whitelist=127.0.0.1,good.example", "--cors=http://a.example:80"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(RAFTKV, flags=FLAGS)
    (member,) = cluster.members
    urls = f"http://127.0.0.1:{member.client_port},unix://socket:1"
    member.flags += [f"--listen-client-urls={urls}", f"--listen-metrics-urls=http://127.0.0.1:{METRICS_PORT}"]
    member.flags += [f"--audit-log={cluster.directory / 'audit.log'}", "--audit-level=all"]
    with cluster:
        yield cluster


@pytest.mark.long
def test_history_is_forgotten_by_the_clock(cluster: Cluster) -> None:
    with Wire(cluster.endpoints) as wire:
        first = must_put(wire, "a", b"1")
        must_put(wire, "a", b"2")
        old = rpc_pb2.RangeRequest(key=b"a", revision=first - 1)
        assert wire.call(RANGE, old).code == "OK"

        def is_forgotten() -> bool:
            # The history must go on: what was compacted to is not compacted to again.
            must_put(wire, "a", b"2")
            return wire.call(RANGE, old).text == "etcdserver: mvcc: required revision has been compacted"

        wait_for(is_forgotten, "the compaction")
        assert value_of(wire, "a") == b"2"


@pytest.mark.parametrize(
    ("headers", "status", "origin"),
    [
        ({}, 200, None),
        ({"Host": "good.example:2379"}, 200, None),
        ({"Host": "evil.example"}, 421, None),
        ({"Origin": "http://a.example:80"}, 200, "http://a.example:80"),
        ({"Origin": "http://b.example:80"}, 200, None),
    ],
)
@pytest.mark.parametrize("listener", ["clients", "metrics"])
def test_hosts_and_origins(cluster, headers, status, origin, listener):
    port = METRICS_PORT if listener == "metrics" else int(cluster.endpoints[0].rpartition(":")[2])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", "/health", headers=headers)
        answer = connection.getresponse()
        assert (answer.status, answer.getheader("Access-Control-Allow-Origin")) == (status, origin)
        assert ('--host-whitelist "evil.example"' in answer.read().decode()) == (status == 421)
    finally:
        connection.close()


def test_a_unix_socket(cluster: Cluster) -> None:
    path = cluster.directory / "socket:1"
    with Wire([f"unix:{path}"]) as wire:
        must_put(wire, "unix", b"1")
        assert value_of(wire, "unix") == b"1"
    with raftkv.connect(f"unix://{path}") as client:
        found = client.get("unix")
        assert found is not None
        assert found.value == b"1"
    ran = run_ctl(["--endpoints", f"unix://{path}", "get", "unix", "--print-value-only"])
    assert (ran.code, ran.output) == (0, b"1\n")


def test_the_audit_log_notes_each_request(cluster: Cluster) -> None:
    with Wire(cluster.endpoints) as wire:
        revision = must_put(wire, "noted", b"s3cret")
        assert wire.call(RANGE, rpc_pb2.RangeRequest(key=b"noted")).code == "OK"
    path = cluster.directory / "audit.log"
    wait_for(lambda: path.read_text().count('"key":"noted"') == 2, "the lines")
    assert path.stat().st_mode & 0o777 == 0o600
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    put, read = (line for line in lines if line.get("request") == {"key": "noted"})
    assert (put["method"], put["outcome"], put["revision"]) == ("etcdserverpb.KV/Put", "OK", revision)
    assert read["method"] == "etcdserverpb.KV/Range"
    assert "s3cret" not in path.read_text()
