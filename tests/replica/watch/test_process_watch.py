"""Watching real members: slow readers, lost leaders, members that die, progress by the clock."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from raftkv.cli.ctl import top
from tests.compat.wire import Wire
from tests.procs import RAFTKV, Cluster, wait_for
from tests.replica.watch.watching import Watch
from tests.server.process.process import must_put, status_of

LARGE = b"x" * 100_000


@pytest.fixture(scope="module")
def one() -> Iterator[Cluster]:
    program = RAFTKV.with_flags("--watch-progress-notify-interval", "100ms")
    with Cluster(program, size=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def wire(one: Cluster) -> Iterator[Wire]:
    with Wire(one.endpoints) as wire:
        yield wire


def _metric(cluster: Cluster, name: str) -> float:
    return top.fetch(cluster.endpoints[0], None, 10.0)[name]


def _memory_bytes(cluster: Cluster) -> float:
    return _metric(cluster, "process_resident_memory_bytes")


@pytest.mark.long
def test_a_client_that_does_not_read_delays_no_other_and_costs_no_memory(one: Cluster, wire: Wire) -> None:
    """400 MB of events for stalled watchers; then they read, and have every one of them."""
    with Watch(one.endpoints[0], reading=False) as stalled, Watch(one.endpoints[0]) as reader:
        for _ in range(10):
            stalled.create(key=b"slow")
        reader.create(key=b"slow")
        reader.wait(lambda: reader.is_created(0))
        wait_for(lambda: _metric(one, "etcd_debugging_mvcc_watcher_total") == 11, "all watchers")
        must_put(wire, "slow", LARGE)
        before = _memory_bytes(one)
        count = 400
        for number in range(count):
            must_put(wire, "slow", LARGE[: -(number % 7) or None])
        reader.wait(lambda: len(reader.events(0)) == count + 1)
        assert _metric(one, "etcd_debugging_mvcc_slow_watcher_total") == 10
        assert _metric(one, "raftkv_watch_lag_revisions") > count / 2
        # 40 MB of values wait for the database to commit them.
        assert _memory_bytes(one) - before < 100e6
        stalled.start_reading()
        revisions = [event.kv.mod_revision for event in reader.events(0)]
        for watch_id in range(10):
            stalled.wait(lambda watch_id=watch_id: len(stalled.events(watch_id)) == count + 1)
            assert [event.kv.mod_revision for event in stalled.events(watch_id)] == revisions
        wait_for(lambda: _metric(one, "etcd_debugging_mvcc_slow_watcher_total") == 0, "the watcher to catch up")


def test_half_closed_streams_keep_their_watchers(one: Cluster, wire: Wire) -> None:
    with Watch(one.endpoints[0]) as watch:
        watch.create(key=b"half")
        watch.wait(lambda: watch.is_created(0))
        watch.half_close()
        must_put(wire, "half", b"1")
        watch.wait(lambda: len(watch.events(0)) == 1)
        assert not watch.ended


def test_progress_is_sent_periodically_to_idle_watches_that_asked(one: Cluster, wire: Wire) -> None:
    with Watch(one.endpoints[0]) as watch:
        watch.create(key=b"idle", progress_notify=True)
        watch.create(key=b"idle")
        watch.wait(lambda: watch.is_created(1))
        revision = must_put(wire, "other", b"1")
        watch.wait(lambda: watch.of(0) and watch.of(0)[-1].header.revision == revision, "a progress notification")
        assert not watch.events(0)
        assert len(watch.of(1)) == 1


@pytest.mark.long
def test_streams_that_insist_on_a_leader_end_without_one() -> None:
    program = RAFTKV.with_flags("--election-timeout", "500", "--heartbeat-interval", "50")
    with Cluster(program, size=3) as cluster, Wire(cluster.endpoints) as wire:
        wait_for(lambda: status_of(wire, 0).leader != 0, "a leader")
        insisting = Watch(cluster.endpoints[0], metadata=(("hasleader", "true"),))
        patient = Watch(cluster.endpoints[0])
        with insisting, patient:
            for watch in (insisting, patient):
                watch.create(key=b"k")
                watch.wait(lambda watch=watch: watch.is_created(0))
            for member in cluster.members[1:]:
                member.kill()
            insisting.wait(lambda: insisting.ended)
            assert insisting.error is not None
            assert insisting.error.code().name == "UNAVAILABLE"
            assert insisting.error.details() == "etcdserver: no leader"
            with Watch(cluster.endpoints[0], metadata=(("hasleader", "true"),)) as refused:
                refused.create(key=b"k")
                refused.wait(lambda: refused.ended)
                assert refused.error.details() == "etcdserver: no leader"
            assert not patient.ended
