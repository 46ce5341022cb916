"""Maintenance.Hash covers the logical contents: restarts do not change it, and members agree.

The same is asked of real etcd 3.5.1, so that what is expected here is what its users know.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from raftkv.pb import rpc_pb2
from tests.compat.wire import Wire
from tests.long import long_except
from tests.procs import ETCD, RAFTKV, Cluster, wait_for
from tests.server.process.process import COMPACT, DELETE, must_put

pytestmark = pytest.mark.xdist_group("process-hash")

HASH = "etcdserverpb.Maintenance/Hash"


@pytest.fixture(scope="module", params=long_except([ETCD, RAFTKV], [RAFTKV]), ids=lambda program: program.name)
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with Cluster(request.param, size=3) as cluster:
        yield cluster


def _hash(wire: Wire, member: int) -> int:
    answer = wire.call(HASH, rpc_pb2.HashRequest(), member)
    return answer.message.hash if answer.code == "OK" else 0


def _hashes(wire: Wire) -> set[int]:
    return {_hash(wire, member) for member in range(len(wire.endpoints))}


def _agreed(wire: Wire) -> int:
    """Wait until all members have the same hash; return it."""

    def agree() -> bool:
        hashes = _hashes(wire)
        return len(hashes) == 1 and 0 not in hashes

    wait_for(agree, "members that agree")
    return _hash(wire, 0)


def _write(wire: Wire, turn: str) -> None:
    """Keys, a lease with a key, deletions, and a compaction that all members carry out."""
    grant = wire.call("etcdserverpb.Lease/LeaseGrant", rpc_pb2.LeaseGrantRequest(TTL=10_000)).message
    put = rpc_pb2.PutRequest(key=b"leased", value=turn.encode(), lease=grant.ID)
    assert wire.call("etcdserverpb.KV/Put", put).code == "OK"
    for number in range(20):
        revision = must_put(wire, f"k{number % 7}", f"{turn} {number}".encode())
    assert wire.call(DELETE, rpc_pb2.DeleteRangeRequest(key=b"k3")).code == "OK"
    assert wire.call(COMPACT, rpc_pb2.CompactionRequest(revision=revision - 5, physical=True)).code == "OK"


@pytest.mark.parametrize("gently", long_except([True, False], {False}), ids=["SIGTERM", "SIGKILL"])
def test_a_restart_leaves_the_hash_and_members_agree(cluster: Cluster, gently: bool) -> None:
    with Wire(cluster.endpoints) as wire:
        _write(wire, f"before, {gently}")
        before = _agreed(wire)
        for member in cluster.members:
            if gently:
                member.stop()
            else:
                member.kill()
            member.restart()
        cluster.wait_ready()
        wire.reconnect()
        assert _hashes(wire) == {before}
        must_put(wire, "after", str(gently).encode())
        assert _agreed(wire) != before
