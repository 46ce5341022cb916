"""Defragment on a real member: freed space, service during the run, and a member killed at each step."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from raftkv.pb import rpc_pb2
from tests.compat.wire import Wire
from tests.long import long_except
from tests.procs import RAFTKV, Cluster, Member, wait_for
from tests.server.process.process import COMPACT, hash_of, log_of, must_put, status_of, value_of, wait_for_end

DEFRAGMENT = "etcdserverpb.Maintenance/Defragment"
POINTS = ["defragBeforeCopy", "defragAfterCopy", "defragBeforeRename", "defragAfterRename"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(RAFTKV, flags=["--backend-batch-interval", "10ms"]) as cluster:
        yield cluster


@pytest.fixture
def wire(cluster: Cluster) -> Iterator[Wire]:
    member = cluster.members[0]
    if member.environment or not member.is_running():
        member.kill()
        member.environment = {}
        member.start()
    cluster.wait_ready()
    with Wire(cluster.endpoints) as wire:
        yield wire


def _holes(wire: Wire) -> int:
    """Make some MiB of free pages; the revision after."""
    for number in range(60):
        revision = must_put(wire, f"k{number % 5}", bytes(64 * 1024))
    assert wire.call(COMPACT, rpc_pb2.CompactionRequest(revision=revision, physical=True)).code == "OK"
    return must_put(wire, "after", b"1")


def _files(member: Member) -> list[str]:
    return sorted(path.name for path in (member.data_dir / "member" / "snap").iterdir())


def test_free_pages_are_given_back(cluster: Cluster, wire: Wire) -> None:
    """Two callers at once are both answered, without a header; watches, leases and history go on."""
    revision = _holes(wire)
    before, hashed = status_of(wire).dbSize, hash_of(wire, 0, revision)
    calls = [wire.start(DEFRAGMENT, b"") for _ in range(3)]
    answers = [call.answer() for call in calls]
    assert [answer.code for answer in answers] == ["OK"] * 3
    assert hash_of(wire, 0, revision) == hashed
    must_put(wire, "after", b"2")
    assert status_of(wire).dbSize < before
    assert _files(cluster.members[0]) == ["applied", "db", "db-lock"]


@pytest.mark.parametrize("point", long_except(POINTS, {"defragAfterRename"}))
def test_a_member_killed_while_it_defragments(cluster: Cluster, wire: Wire, point: str) -> None:
    """The next start has what was acknowledged, also after the copy was made, and leaves no copy."""
    member = cluster.members[0]
    revision = _holes(wire)
    hashed = hash_of(wire, 0, revision)
    member.kill()
    member.environment = {"RAFTKV_FAILPOINTS": f"{point}=panic"}
    member.restart()
    cluster.wait_ready()
    wire.reconnect()
    call = wire.start(DEFRAGMENT, b"")
    written = 0
    while (
        wire.call("etcdserverpb.KV/Put", rpc_pb2.PutRequest(key=b"meanwhile", value=b"%d" % (written + 1))).code == "OK"
    ):
        written += 1
    assert call.answer().code != "OK"
    assert wait_for_end(member) == 66
    assert f"failpoint {point}: panic" in log_of(member)
    member.environment = {}
    member.start()
    cluster.wait_ready()
    wire.reconnect()
    assert hash_of(wire, 0, revision) == hashed
    assert int(value_of(wire, "meanwhile") or 0) >= written
    assert _files(member) == ["applied", "db", "db-lock"]
    assert wire.call(DEFRAGMENT, rpc_pb2.DefragmentRequest()).code == "OK"


def test_no_room_leaves_everything_as_it_was(cluster: Cluster, wire: Wire) -> None:
    member = cluster.members[0]
    revision = _holes(wire)
    member.kill()
    member.environment = {"RAFTKV_FAILPOINTS": "defragBeforeCopy=error(ENOSPC)"}
    member.restart()
    cluster.wait_ready()
    wire.reconnect()
    hashed = hash_of(wire, 0, revision)
    answer = wire.call(DEFRAGMENT, rpc_pb2.DefragmentRequest())
    assert answer.code == grpc.StatusCode.RESOURCE_EXHAUSTED.name
    assert answer.text.startswith("raftkv: no room in the database")
    must_put(wire, "later", b"1")
    assert hash_of(wire, 0, revision) == hashed
    wait_for(lambda: _files(member) == ["applied", "db", "db-lock"], "no copy is left")
