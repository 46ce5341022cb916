"""`raftkvctl bench` of watches, leases and locks, on etcd and on raftkv; the check of a fan-out on made-up streams."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from raftkv.cli.bench.command import Arrivals, CountingStream
from raftkv.cli.ctl import top
from raftkv.pb import kv_pb2, rpc_pb2
from tests import forked
from tests.cli.programs import PATIENT, Running, raftkvctl
from tests.long import long_except
from tests.procs import ETCD_FAST, RAFTKV, Cluster, wait_for

PROGRAMS = {"etcd": ETCD_FAST, "raftkv": RAFTKV}


@pytest.fixture(scope="module", params=long_except(PROGRAMS, {"raftkv"}))
def endpoint(request: pytest.FixtureRequest) -> Iterator[str]:
    with Cluster(PROGRAMS[request.param]) as cluster:
        yield cluster.endpoints[0]


def bench(endpoint: str, *words: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "raftkv.cli.ctl", "bench", *words, "--endpoints", endpoint, "--json", *PATIENT]
    done = forked.run(command, timeout_s=120)
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "events"),
    [
        (("--total", "20"), 20 * 1000),
        (("--total", "20", "--clients", "5", "--streams", "3", "--watch-per-stream", "7", "--conns", "2"), 20 * 21),
        (("--total", "35", "--watched-key-total", "30", "--watch-per-stream", "3"), 35),
        (("--total", "40", "--clients", "4", "--watched-key-total", "10", "--processes", "2", "--val-size", "0"), 4000),
        (("--total", "5", "--put-rate", "1000"), 5000),
    ],
)
def test_every_watcher_gets_every_event(endpoint: str, words: tuple[str, ...], events: int) -> None:
    code, summary = bench(endpoint, "watch", *words)
    assert code == 0
    assert summary["events"] == summary["expected"] == events
    assert (summary["wrong"], summary["disordered"], summary["errors"]) == (0, 0, {})
    assert summary["rate"] > 0
    assert summary["put_calls"] == int(words[1])


def test_idle_watchers_get_nothing(endpoint: str) -> None:
    code, summary = bench(endpoint, "watch", "--idle", "--total", "50", "--clients", "5")
    assert code == 0
    assert (summary["events"], summary["put_calls"], summary["watchers"]) == (0, 50, 1000)


@pytest.mark.parametrize(
    "words",
    [
        ("watch-latency",),
        ("watch-latency", "--clients", "3", "--put-rate", "5000"),
        ("lease-keepalive", "--clients", "4", "--conns", "2"),
        ("lease-keepalive", "--clients", "4", "--leases", "20", "--processes", "2"),
        ("lock", "--clients", "3"),
        ("lock", "--clients", "4", "--locks", "2", "--processes", "2"),
    ],
    ids=" ".join,
)
def test_every_call_is_counted(endpoint: str, words: tuple[str, ...]) -> None:
    code, summary = bench(endpoint, *words, "--total", "41")
    assert code == 0
    assert (summary["calls"], summary["errors"]) == (41, {})
    assert 0 < summary["p50_ms"] <= summary["p90_ms"] <= summary["p99_ms"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["watch", "lease-keepalive"])
def test_a_member_that_dies_ends_it_in_one_line(name: str) -> None:
    metric = "etcd_debugging_lease_renewed_total" if name == "lease-keepalive" else "_mvcc_current_revision"
    with (
        Cluster(RAFTKV) as cluster,
        Running(raftkvctl(cluster.endpoints[0], "bench", name, "--total", "10000000", *PATIENT)) as program,
    ):
        wait_for(lambda: measured(cluster, metric) > 50, "the load")
        cluster.members[0].kill()
        done = program.wait()
    assert (done.code, done.output) == (1, b"")
    *notes, line = done.errors.splitlines()
    assert line.startswith("Error: ")
    assert all(note.startswith("raftkvctl: ") for note in notes), "where it wrote, and that its keys are still there"


def measured(cluster: Cluster, name: str) -> float:
    samples = top.fetch(cluster.endpoints[0], None, 5.0)
    return next((value for key, value in samples.items() if key.endswith(name)), 0.0)


class Call:
    """What a CountingStream needs of a call."""

    def __init__(self) -> None:
        self.listener: Callable[[bytes], None] = lambda message: None
        self.sent: list[rpc_pb2.WatchRequest] = []

    def deliver_to(self, listener: Callable[[bytes], None]) -> None:
        self.listener = listener

    def send_nowait(self, message: bytes) -> None:
        self.sent.append(rpc_pb2.WatchRequest.FromString(message))

    def tell(self, watch_id: int, revisions: Sequence[int], **fields: Any) -> None:
        events = [kv_pb2.Event(kv=kv_pb2.KeyValue(key=b"k", mod_revision=revision)) for revision in revisions]
        header = rpc_pb2.ResponseHeader(cluster_id=2**64 - 1, member_id=2**63, revision=2**40, raft_term=7)
        response = rpc_pb2.WatchResponse(header=header, watch_id=watch_id, events=events, **fields)
        self.listener(response.SerializeToString())


def counted(*told: tuple[int, Sequence[int]]) -> tuple[CountingStream, Arrivals]:
    async def scenario() -> tuple[CountingStream, Arrivals]:
        call = Call()
        arrivals = Arrivals(watchers=300, events=6)
        stream = CountingStream(call, [b"k"] * 300, arrivals)
        assert [request.create_request.watch_id for request in call.sent] == list(range(1, 301))
        for watch_id in range(1, 301):
            call.tell(watch_id, (), created=True)
        for watch_id, revisions in told:
            call.tell(watch_id, revisions)
        return stream, arrivals

    return asyncio.run(scenario())


def test_events_are_counted_by_watcher() -> None:
    stream, arrivals = counted((1, [5]), (300, [5]), (300, [6, 7]), (130, [5]), (130, [8]))
    assert (stream.counts[1], stream.counts[300], stream.counts[130], sum(stream.counts)) == (1, 3, 2, 6)
    assert (stream.messages, stream.disordered) == (5, 0)
    assert (arrivals.watchers, arrivals.events, arrivals.changed.is_set()) == (0, 0, True)


@pytest.mark.parametrize(
    "told", [((2, [5]), (2, [5])), ((2, [6]), (2, [5])), ((2, [5, 6, 6]),), ((2, [5, 7]), (2, [6]))]
)
def test_events_that_come_twice_or_out_of_order_are_seen(told: tuple[tuple[int, Sequence[int]], ...]) -> None:
    assert counted(*told)[0].disordered == 1


async def test_a_cancelled_watcher_spoils_the_measurement() -> None:
    call = Call()
    arrivals = Arrivals(1, 1)
    CountingStream(call, [b"k"], arrivals)
    call.tell(1, (), canceled=True, cancel_reason="no more")
    assert arrivals.error == "a watcher was cancelled: no more"
