"""HTTP/1.1 on the client port, on etcd 3.5.1 and on raftkv: /health, /version, /metrics."""

from __future__ import annotations

import http.client
import json
import re

import pytest

from raftkv.cli import metrics
from raftkv.pb import rpc_pb2
from tests.compat.wire import Wire
from tests.procs import Cluster, http_get


def test_health(cluster: Cluster) -> None:
    for endpoint in cluster.endpoints:
        status, _, body = http_get(endpoint, "/health")
        assert (status, json.loads(body)) == (200, {"health": "true", "reason": ""})


@pytest.mark.parametrize("query", ["?serializable=true", "?exclude=NOSPACE", "?exclude=NOSPACE&exclude=CORRUPT"])
def test_health_with_options(cluster: Cluster, query: str) -> None:
    status, _, body = http_get(cluster.endpoints[0], f"/health{query}")
    assert (status, json.loads(body)["health"]) == (200, "true")


@pytest.mark.parametrize("path", ["/health", "/version"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_only_get(cluster: Cluster, path: str, method: str) -> None:
    host, _, port = cluster.endpoints[0].rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=5)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        assert (answer.status, answer.getheader("Allow")) == (405, "GET")
        assert answer.read() == b"Method Not Allowed\n"
    finally:
        connection.close()


def test_version(cluster: Cluster) -> None:
    status, content_type, body = http_get(cluster.endpoints[0], "/version")
    versions = json.loads(body)
    assert (status, content_type) == (200, "application/json")
    assert set(versions) >= {"etcdserver", "etcdcluster"}
    assert all(re.fullmatch(r"\d+\.\d+\.\d+(-\S+)?", version) for version in versions.values())
    assert versions["etcdcluster"].endswith(".0")


def test_metrics(cluster: Cluster) -> None:
    status, content_type, body = http_get(cluster.endpoints[0], "/metrics")
    assert status == 200
    assert content_type.startswith("text/plain; version=0.0.4")
    assert re.search(r"^etcd_server_has_leader 1(\.0)?$", body, re.MULTILINE)
    assert re.search(r"^# TYPE etcd_server_has_leader gauge$", body, re.MULTILINE)


def test_an_unknown_path(cluster: Cluster) -> None:
    assert http_get(cluster.endpoints[0], "/nothing")[0] == 404


def test_several_requests_on_one_connection(cluster: Cluster) -> None:
    host, _, port = cluster.endpoints[0].rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=5)
    try:
        for path in ("/health", "/version", "/health"):
            connection.request("GET", path)
            answer = connection.getresponse()
            assert (answer.status, bool(answer.read())) == (200, True)
    finally:
        connection.close()


def _counter(cluster: Cluster, name: str) -> float:
    return metrics.fetch(cluster.endpoints[0], None, 10.0)[name]


def test_operations_are_counted(cluster: Cluster, wire: Wire) -> None:
    names = ("etcd_mvcc_put_total", "etcd_mvcc_delete_total", "etcd_mvcc_range_total")
    before = [_counter(cluster, name) for name in names]
    for number in range(3):
        wire.call("etcdserverpb.KV/Put", rpc_pb2.PutRequest(key=b"count%d" % number))
    wire.call("etcdserverpb.KV/Range", rpc_pb2.RangeRequest(key=b"count0"))
    wire.call("etcdserverpb.KV/DeleteRange", rpc_pb2.DeleteRangeRequest(key=b"count", range_end=b"counu"))
    puts, deletes, ranges = (
        after - earlier for after, earlier in zip((_counter(cluster, name) for name in names), before, strict=True)
    )
    assert (puts, deletes) == (3, 1)
    assert ranges >= 1
