"""Reads with a staleness bound at an isolated member."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator

import pytest

import raftkv
from raftkv.client.errors import EndpointsFailed
from raftkv.pb import rpc_pb2
from tests import forked
from tests.compat.wire import Wire
from tests.procs import RAFTKV, Cluster
from tests.server.process.process import RANGE, must_put

TXN = "etcdserverpb.KV/Txn"
RANGE_STREAM = "/etcdserverpb.KV/RangeStream"
MEMBER_LIST = "etcdserverpb.Cluster/MemberList"
REQUEST = rpc_pb2.RangeRequest(key=b"k")
TEN_MINUTES = (("raftkv-max-staleness-ms", "600000"),)
NOW = (("raftkv-max-staleness-ms", "0"),)


@pytest.fixture(scope="module")
def alone() -> Iterator[str]:
    """The endpoint of a member that has confirmed a read once; since then the others stand still."""
    with Cluster(RAFTKV, size=3) as cluster:
        with Wire(cluster.endpoints) as wire:
            must_put(wire, "k", b"v")
            assert wire.call(RANGE, REQUEST, metadata=NOW).message.kvs[0].value == b"v"
        others = [member.process for member in cluster.members[1:]]
        for process in others:
            assert process is not None
            process.send_signal(signal.SIGSTOP)
        yield cluster.endpoints[0]


def test_recent_read_is_served_without_a_quorum(alone: str) -> None:
    with Wire([alone]) as wire:
        answer = wire.call(RANGE, REQUEST, metadata=TEN_MINUTES)
        assert answer.message.kvs[0].value == b"v"
        reading = rpc_pb2.TxnRequest(success=[rpc_pb2.RequestOp(request_range=REQUEST)])
        answer = wire.call(TXN, reading, metadata=TEN_MINUTES)
        assert answer.message.responses[0].response_range.kvs[0].value == b"v"
        listing = rpc_pb2.MemberListRequest(linearizable=True)
        assert len(wire.call(MEMBER_LIST, listing, metadata=TEN_MINUTES).message.members) == 3
        stream = wire.channel().unary_stream(RANGE_STREAM)(REQUEST.SerializeToString(), metadata=TEN_MINUTES)
        assert rpc_pb2.RangeStreamResponse.FromString(next(iter(stream))).range_response.kvs[0].value == b"v"


@pytest.mark.parametrize("serializable", [False, True])
def test_stale_read_waits_for_the_quorum(alone: str, serializable: bool) -> None:
    """Even if the request, without its bound, would take any state."""
    with Wire([alone]) as wire:
        request = rpc_pb2.RangeRequest(key=b"k", serializable=serializable).SerializeToString()
        assert wire.start(RANGE, request, metadata=NOW, timeout_s=0.3).answer().code == "DEADLINE_EXCEEDED"


@pytest.mark.parametrize("bound", ["", "-1", "1.5", "1_0", "0x1", "9" * 40])
def test_invalid_bound_is_refused(alone: str, bound: str) -> None:
    with Wire([alone]) as wire:
        answer = wire.call(RANGE, REQUEST, metadata=(("raftkv-max-staleness-ms", bound),))
    text = "raftkv: metadata raftkv-max-staleness-ms must be a whole number of milliseconds, 0 or more"
    assert (answer.code, answer.text) == ("INVALID_ARGUMENT", text)


@pytest.mark.long
def test_the_client_library_states_a_bound(alone: str) -> None:
    with raftkv.connect(alone, timeout_s=20) as kv:
        item = kv.get("k", max_staleness_s=600)
        assert item is not None
        assert item.value == b"v"
        assert kv.range("k", prefix=True, max_staleness_s=600).items[0].value == b"v"
        assert kv.count("k", max_staleness_s=600) == 1
        assert kv.get_many(["k"], max_staleness_s=600) == [item]
        assert len(kv.members(max_staleness_s=600)) == 3
        with pytest.raises(ValueError, match="max_staleness_s must not be negative"):
            kv.get("k", max_staleness_s=-1)
    with raftkv.connect(alone, timeout_s=0.5) as kv, pytest.raises(EndpointsFailed):
        kv.get("k", max_staleness_s=0.000_9)


@pytest.mark.long
@pytest.mark.parametrize(
    ("bound", "timeout", "status", "output"),
    [
        ("10m", "90s", 0, "k\nv\n"),
        ("-1s", "90s", 128, "Error: --max-staleness must not be negative\n"),
        ("0s", "400ms", 1, "Error: context deadline exceeded\n"),
    ],
)
def test_raftkvctl_states_a_bound(alone: str, bound: str, timeout: str, status: int, output: str) -> None:
    program = [sys.executable, "-m", "raftkv.cli.ctl", "--endpoints", alone, f"--command-timeout={timeout}"]
    command = [*program, "get", "k", f"--max-staleness={bound}"]
    ran = forked.run(command, timeout_s=90)
    shown = ran.stderr.splitlines(keepends=True)[0] if status else ran.stdout
    assert (ran.returncode, shown) == (status, output)
