"""HTTP/1.1 on the client port, on etcd 3.5.1 and on raftkv: /health, /version, /metrics, /debug/vars."""

from __future__ import annotations

import http.client
import json
import re

import pytest

from raftkv.cli.ctl import top
from raftkv.pb import rpc_pb2
from tests.compat.wire import Wire
from tests.procs import Cluster, http_get


def test_health(cluster: Cluster) -> None:
    for endpoint in cluster.endpoints:
        status, content_type, body = http_get(endpoint, "/health")
        assert (status, json.loads(body)) == (200, {"health": "true", "reason": ""})
        assert content_type == "text/plain; charset=utf-8"


@pytest.mark.parametrize("query", ["?serializable=true", "?exclude=NOSPACE", "?exclude=NOSPACE&exclude=CORRUPT"])
def test_health_with_options(cluster: Cluster, query: str) -> None:
    status, _, body = http_get(cluster.endpoints[0], f"/health{query}")
    assert (status, json.loads(body)["health"]) == (200, "true")


def _ask(cluster: Cluster, method: str, path: str) -> tuple[http.client.HTTPResponse, bytes]:
    host, _, port = cluster.endpoints[0].rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize("path", ["/health", "/version", "/debug/vars"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD"])
def test_only_get(cluster: Cluster, path: str, method: str) -> None:
    answer, body = _ask(cluster, method, path)
    assert (answer.status, answer.getheader("Allow")) == (405, "GET")
    assert answer.getheader("X-Content-Type-Options") == "nosniff"
    assert body == (b"" if method == "HEAD" else b"Method Not Allowed\n")


@pytest.mark.parametrize("path", ["/", "/healthz", "/health/", "/version/", "/livez/nothing", "/debug/requests"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_pages_that_there_are_not(cluster: Cluster, path: str, method: str) -> None:
    answer, body = _ask(cluster, method, path)
    assert (answer.status, body) == (404, b"404 page not found\n")
    assert answer.getheader("Content-Type") == "text/plain; charset=utf-8"
    assert answer.getheader("X-Content-Type-Options") == "nosniff"


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
def test_metrics_are_answered_for_every_method(cluster: Cluster, method: str) -> None:
    assert _ask(cluster, method, "/metrics")[0].status == 200


def test_variables_of_the_process(cluster: Cluster) -> None:
    answer, body = _ask(cluster, "GET", "/debug/vars")
    assert (answer.status, answer.getheader("Content-Type")) == (200, "application/json; charset=utf-8")
    values = json.loads(body)
    assert list(values) == ["cmdline", "file_descriptor_limit", "memstats", "raft.status"]
    assert values["file_descriptor_limit"] > 100
    status = values["raft.status"]
    assert [*status] == [
        *("id", "term", "vote", "commit", "lead", "raftState", "applied", "progress", "leadtransferee")
    ]
    assert status["raftState"] in ("StateLeader", "StateFollower")
    assert all({*each} == {"match", "next", "state"} for each in status["progress"].values())


@pytest.mark.parametrize(("path", "location"), [("/v3", "/v3/"), ("/v3/kv/../auth/x?a='b&c", "/v3/auth/x?a='b&c")])
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
def test_paths_served_elsewhere(cluster: Cluster, method: str, path: str, location: str) -> None:
    answer, body = _ask(cluster, method, path)
    assert (answer.status, answer.getheader("Location")) == (301, location)
    assert answer.getheader("Content-Type") == (None if method == "POST" else "text/html; charset=utf-8")
    shown = location.replace("&", "&amp;").replace("'", "&#39;")
    assert body == (f'<a href="{shown}">Moved Permanently</a>.\n\n'.encode() if method == "GET" else b"")


def test_the_head_of_a_call(raftkv: Cluster) -> None:
    """Answer as etcd 3.7 does; 3.5.1 says 405."""
    assert _ask(raftkv, "HEAD", "/v3/kv/range")[0].status == 400
    assert _ask(raftkv, "GET", "/v3/kv/range")[0].status == 405


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


def test_several_requests_on_one_connection(cluster: Cluster) -> None:
    host, _, port = cluster.endpoints[0].rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    try:
        for path in ("/health", "/version", "/health"):
            connection.request("GET", path)
            answer = connection.getresponse()
            assert (answer.status, bool(answer.read())) == (200, True)
    finally:
        connection.close()


def _counter(cluster: Cluster, name: str) -> float:
    return top.fetch(cluster.endpoints[0], None, 10.0)[name]


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
