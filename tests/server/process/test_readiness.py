"""When a starting member serves clients, and that it never shows less than it had shown before."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator

import pytest

from raftkv.pb import rpc_pb2
from tests.compat.wire import Wire
from tests.procs import RAFTKV, Cluster, Member, free_port, http_get, wait_for
from tests.server.process.process import RANGE, log_of, must_put, status_of

LATE = ("--backend-batch-interval", "60s")
"""The database is committed so rarely that a restart finds nothing of the test in it."""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(RAFTKV, size=3, flags=LATE) as cluster:
        yield cluster


READY = "ready to serve client requests"
"""etcd's line, the whole message: scripts wait for it."""


def shown_by(member: Member) -> tuple[int, int, int]:
    """The first that a member shows: revision of a serializable read and of Status, and the applied index."""
    wait_for(lambda: answer(member.endpoint, "/version")[0] == 200, f"{member.name} to serve")
    with Wire([member.endpoint]) as wire:
        read = wire.call(RANGE, rpc_pb2.RangeRequest(key=b"k", serializable=True))
        assert read.code == "OK", read
        status = status_of(wire)
        return read.revision, status.header.revision, status.raftAppliedIndex


def metrics_endpoint(member: Member) -> str:
    """Give a member another address for metrics, which answers before clients are served."""
    endpoint = f"127.0.0.1:{free_port()}"
    member.flags += ["--listen-metrics-urls", f"http://{endpoint}"]
    return endpoint


def answer(endpoint: str, path: str) -> tuple[int, str]:
    """Status and body; 0 while no process listens."""
    try:
        status, _, body = http_get(endpoint, path)
    except (OSError, http.client.HTTPException):
        return 0, ""
    return status, body


def answers_within(member: Member, seconds: float) -> bool:
    try:
        return http_get(member.endpoint, "/version", timeout_s=seconds)[0] == 200
    except TimeoutError:
        return False


@pytest.mark.long
@pytest.mark.parametrize("victim", range(3))
def test_a_member_without_a_quorum_shows_no_less_than_before_it_was_killed(cluster: Cluster, victim: int) -> None:
    with Wire(cluster.endpoints) as wire:
        for number in range(20):
            revision = must_put(wire, "k", b"%d" % number, number % 3)
        for member in cluster.members:
            wait_for(lambda member=member: shown_by(member)[0] == revision, "the last write on every member")
    before = shown_by(cluster.members[victim])
    for member in cluster.members:
        member.kill()
    alone = cluster.members[victim]
    alone.flags += ["--wait-cluster-ready-timeout", "1s"]
    told = len(log_of(alone))
    alone.start()
    assert shown_by(alone) >= before
    wait_for(lambda: READY in log_of(alone)[told:], "the line, which a thread writes")
    assert READY not in log_of(alone)[told:].partition("no quorum within 1 s")[0]


@pytest.mark.long
def test_clients_wait_until_a_quorum_is_there(cluster: Cluster) -> None:
    for member in cluster.members:
        member.kill()
    first, second, _ = cluster.members
    endpoint = metrics_endpoint(first)
    for member in (first, second):
        member.flags += ["--wait-cluster-ready-timeout", "10m"]
    told = len(log_of(first))
    first.start()
    wait_for(lambda: answer(endpoint, "/version")[0] == 200, "the address for metrics")
    not_ready = "[-]serializable_read failed: the member is not ready: "
    assert answer(endpoint, "/livez") == (503, f"{not_ready}it has yet to apply its log, or to hear from a quorum\n\n")
    status, body = answer(endpoint, "/readyz")
    assert status == 503
    assert body.startswith("[+]data_corruption ok\n[-]linearizable_read failed: the member is not ready")
    assert answer(endpoint, "/health?serializable=true")[0] == 503
    # Connected, as with etcd, and not answered; refused would be an error to a client that could just as well wait.
    with socket.create_connection(("127.0.0.1", first.client_port)) as early:
        early.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert not answers_within(first, 0.3)
        assert READY not in log_of(first)[told:]
        second.start()
        early.settimeout(30)
        assert early.recv(12) == b"HTTP/1.1 200"
    assert answer(endpoint, "/livez") == (200, "ok\n")
    assert answer(endpoint, "/readyz/linearizable_read?verbose") == (200, "[+]linearizable_read ok\nok\n")
    status, body = answer(endpoint, "/readyz?verbose&exclude=non_learner")
    assert (status, body) == (200, "[+]data_corruption ok\n[+]linearizable_read ok\n[+]serializable_read ok\nok\n")
    assert answer(endpoint, "/readyz/nothing")[0] == 404
    wait_for(lambda: READY in log_of(first)[told:], "the line, which a thread writes")
    assert log_of(first)[told:].count(READY) == 1


@pytest.mark.long
def test_a_member_that_waits_for_a_quorum_stops_when_asked(cluster: Cluster) -> None:
    for member in cluster.members:
        member.kill()
    alone = cluster.members[0]
    alone.flags += ["--wait-cluster-ready-timeout", "10m"]
    endpoint = metrics_endpoint(alone)
    alone.start()
    wait_for(lambda: answer(endpoint, "/version")[0] == 200, "the address for metrics")
    assert alone.stop() == -15


def test_a_single_member_is_ready_at_once_with_all_it_had() -> None:
    with Cluster(RAFTKV, size=1, flags=LATE) as cluster, Wire(cluster.endpoints) as wire:
        revision = must_put(wire, "k")
        wait_for(lambda: READY in log_of(cluster.members[0]), "the line, which a thread writes")
        assert [json.loads(line)["msg"] for line in log_of(cluster.members[0]).splitlines()].count(READY) == 1
        cluster.members[0].kill()
        cluster.members[0].start()
        assert shown_by(cluster.members[0])[0] == revision
        assert "no quorum" not in log_of(cluster.members[0])
