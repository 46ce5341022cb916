"""No field values of any request harm the cluster: all members live, serve and agree after thousands of requests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from random import Random

import grpc
import pytest

from raftkv.apply import wire as requests
from raftkv.pb import rpc_pb2
from raftkv.pb.services import SERVICES, Method
from raftkv.raft import confchange
from raftkv.raft.types import ConfChange, ConfChangeSingle, ConfChangeType, Entry, EntryType
from raftkv.server.main import NEEDS_UPGRADE_STATUS
from raftkv.storage.failpoints import ENVIRONMENT, PANIC_EXIT_STATUS
from raftkv.storage.wal import WAL
from tests.apply.arbitrary import payload
from tests.compat.wire import Wire
from tests.procs import RAFTKV, Cluster, http_get, wait_for
from tests.server.process.process import (
    ALARM,
    STATUS,
    alarms_of,
    disarm_all,
    log_of,
    must_put,
    run_to_end,
    start_to_end,
    status_of,
    value_of,
    wait_for_equal_hashes,
)

CALLS = 1_000
STREAMED_MESSAGES = 5
CALL_TIMEOUT_S = 0.3
"""Locks and campaigns wait for ever; writes take milliseconds."""

IN_FLIGHT = 32
SERVED = [
    (f"{service}/{name}", method)
    for service, methods in SERVICES.items()
    if not service.startswith("raftkvpb.")
    for name, method in methods.items()
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(RAFTKV, size=3) as cluster:
        yield cluster


def _stream(wire: Wire, member: int, path: str, method: Method, rng: Random) -> None:
    """Send a few messages on a stream, take what comes for a moment, leave."""
    channel = wire.channel(member)
    messages = [payload(rng, method.request) for _ in range(STREAMED_MESSAGES)]
    if method.client_streaming:
        call = channel.stream_stream(f"/{path}")(iter(messages), timeout=CALL_TIMEOUT_S)
    else:
        call = channel.unary_stream(f"/{path}")(messages[0], timeout=CALL_TIMEOUT_S)
    with contextlib.suppress(grpc.RpcError):
        next(iter(call), None)
    call.cancel()


def _torment(wire: Wire, rng: Random, calls: int) -> None:
    pending = []
    for _ in range(calls):
        path, method = rng.choice(SERVED)
        member = rng.randrange(len(wire.endpoints))
        if method.server_streaming:
            _stream(wire, member, path, method, rng)
            continue
        pending.append(wire.start(path, payload(rng, method.request), member, timeout_s=CALL_TIMEOUT_S))
        if len(pending) >= IN_FLIGHT:
            for call in pending:
                call.future.code()
            pending.clear()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_arbitrary_requests_do_no_harm(cluster: Cluster, seed: int) -> None:
    rng = Random(seed)
    with Wire(cluster.endpoints) as wire:
        for _ in range(5):
            _torment(wire, rng, CALLS // 5)
            disarm_all(wire)
        revision = must_put(wire, "after", b"all is well")
        assert [member.is_running() for member in cluster.members] == [True] * 3
        wait_for_equal_hashes(wire, revision)
        for position, member in enumerate(cluster.members):
            assert value_of(wire, "after", position) == b"all is well"
            assert list(status_of(wire, position).errors) == []
            assert http_get(member.endpoint, "/health")[0] == 200
            assert "Traceback" not in log_of(member)


def test_unknown_alarms_are_refused_before_they_are_proposed(cluster: Cluster) -> None:
    with Wire(cluster.endpoints) as wire:
        for number in (-1, 7, 2**31 - 1):
            raised = rpc_pb2.AlarmRequest(action=rpc_pb2.AlarmRequest.ACTIVATE, alarm=number)
            answer = wire.call(ALARM, raised)
            assert (answer.code, answer.text) == ("INVALID_ARGUMENT", f"raftkv: unknown alarm {number}")
            answer = wire.call(ALARM, rpc_pb2.AlarmRequest(action=number))
            assert (answer.code, answer.text) == ("INVALID_ARGUMENT", f"raftkv: unknown alarm action {number}")
        assert alarms_of(wire) == []


def _append(cluster: Cluster, data: bytes, kind: EntryType = EntryType.NORMAL) -> None:
    """Put an entry at the end of the log of a stopped member."""
    wal, recovered = WAL.open(str(cluster.members[0].data_dir / "member" / "wal"))
    last = recovered.entries[-1]
    wal.append(None, [Entry(term=last.term, index=last.index + 1, type=kind, data=data)])
    wal.close()


def _alarm_lines(wire: Wire) -> list[str]:
    answer = wire.call(STATUS, rpc_pb2.StatusRequest())
    return list(answer.message.errors) if answer.code == "OK" else []


@pytest.mark.long
def test_entries_of_another_version_in_the_log() -> None:
    """An alarm without a name is listed and disarmed; an entry that needs a later version is named, at each start."""
    with Cluster(RAFTKV) as cluster:
        member = cluster.members[0]
        member.stop()
        old = rpc_pb2.AlarmRequest(action=rpc_pb2.AlarmRequest.ACTIVATE, memberID=5, alarm=-1)
        _append(cluster, requests.encode(requests.Kind.ALARM, 1, old.SerializeToString()))
        _append(cluster, b"short")
        member.start()
        with Wire(cluster.endpoints) as wire:
            wait_for(lambda: _alarm_lines(wire) == ["memberID:5 alarm:-1 "], "the alarm of the old log")
            assert http_get(member.endpoint, "/health")[:3:2] == (503, '{"health":"false","reason":"ALARM UNKNOWN"}\n')
            disarm_all(wire)
            must_put(wire, "k")
        member.wait_ready()
        member.stop()
        _append(cluster, requests.encode(200, 2, b"\x02\x07 of the future"))
        for _ in range(2):
            line = start_to_end(member).one_line(NEEDS_UPGRADE_STATUS)
            assert "an entry of kind 200" in line
            assert "run raftkv 2.7 or later on this data" in line


@pytest.mark.long
@pytest.mark.parametrize("point", ["beforeApplyOneConfChange", "afterApplyOneConfChange"])
def test_a_crash_around_a_membership_change(point: str) -> None:
    with Cluster(RAFTKV) as cluster:
        member = cluster.members[0]
        member.stop()
        learner = ConfChange((ConfChangeSingle(ConfChangeType.ADD_LEARNER_NODE, 77),))
        _append(cluster, confchange.encode(learner), EntryType.CONF_CHANGE)
        flags = member.command()[len(RAFTKV.command) :]
        ended = run_to_end(*flags, environment={ENVIRONMENT: f"{point}=panic"})
        assert ended.status == PANIC_EXIT_STATUS
        member.restart()
        with Wire(cluster.endpoints) as wire:
            must_put(wire, "k")
