"""A record of one member's database is changed from outside: its detection, refused requests, and recovery."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from raftkv.pb import rpc_pb2
from raftkv.storage import schema
from raftkv.storage.revision import SEAL_BYTES, seal
from tests.compat.wire import Wire
from tests.long import long_except
from tests.procs import RAFTKV, Cluster, Member, http_get, wait_for
from tests.server.process.process import (
    COMPACT,
    RANGE,
    alarms_of,
    disarm_all,
    leader_of,
    log_of,
    must_put,
    put,
    status_of,
    value_of,
    wait_for_end,
)

CORRUPT = ("DATA_LOSS", "etcdserver: corrupt cluster")


def corrupt(member: Member, old: bytes, new: bytes) -> None:
    """Write another value into the records of a stopped member, with a checksum that is right."""
    path: Path = member.data_dir / "member" / "snap" / "db"
    with lmdb.open(str(path), subdir=False, max_dbs=20, map_size=1 << 34) as environment:
        handle = environment.open_db(schema.KEY, create=False)
        with environment.begin(write=True, db=handle) as txn:
            items = [(key, record) for key, record in txn.cursor() if old in record]
            assert items
            for key, record in items:
                txn.put(key, seal(key, record[SEAL_BYTES:].replace(old, new)))


def checks(member: Member, kind: str, result: str) -> float:
    text = http_get(member.endpoint, "/metrics")[2]
    name = f'raftkv_corruption_checks_total{{kind="{kind}",result="{result}"}}'
    return float(next(line for line in text.splitlines() if line.startswith(name)).split()[-1])


@pytest.fixture(params=long_except(["running", "compaction"], {"compaction"}))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def cluster(kind: str) -> Iterator[Cluster]:
    flags = {
        "running": ["--corrupt-check-time", "300ms"],
        "compaction": ["--compact-hash-check-time", "300ms", "--feature-gates", "CompactHashCheck=true"],
    }
    with Cluster(RAFTKV, size=3, flags=[*flags[kind], "--backend-batch-interval", "10ms"]) as cluster:
        yield cluster


def _wait_served(wire: Wire, member: int) -> None:
    """Wait for a member's first answer. /health would not do: it fails from the alarm on, which may come at once."""
    get = rpc_pb2.RangeRequest(key=b"k1")
    wait_for(lambda: wire.call(RANGE, get, member).code == "OK", "the member")


@pytest.mark.long
def test_a_changed_record_is_found_and_writes_are_refused_until_disarmed(cluster: Cluster, kind: str) -> None:
    with Wire(cluster.endpoints) as wire:
        for number in range(20):
            revision = must_put(wire, f"k{number}", b"untouched")
        wait_for(lambda: leader_of(wire) >= 0, "a leader")
        follower = cluster.members[(leader_of(wire) + 1) % 3]
        victim = status_of(wire, cluster.members.index(follower)).header.member_id
        follower.stop()
        # No hash can be compared with that of a member that is away.
        if kind == "running":
            leader = cluster.members[leader_of(wire, (cluster.members.index(follower) + 1) % 3)]
            wait_for(lambda: checks(leader, kind, "unknown") > 0, "a check that does not know")
        corrupt(follower, b"untouched", b"disturbed")
        follower.start()
        wire.reconnect()
        _wait_served(wire, cluster.members.index(follower))
        if kind == "compaction":
            assert wire.call(COMPACT, rpc_pb2.CompactionRequest(revision=revision)).code == "OK"
        wait_for(lambda: alarms_of(wire) == [(victim, "CORRUPT")], "the alarm")
        answer = put(wire, "after")
        assert (answer.code, answer.text) == CORRUPT
        for member in range(3):
            assert value_of(wire, "k1", member) in (b"untouched", b"disturbed")
        assert f"memberID:{victim} alarm:CORRUPT " in status_of(wire).errors
        leader = cluster.members[leader_of(wire)]
        assert "corruption check" in log_of(leader)
        assert checks(leader, kind, "different") > 0
        # The record is put right; until the alarm is disarmed /health says so, and no member is "ready".
        follower.stop()
        corrupt(follower, b"disturbed", b"untouched")
        follower.start()
        wire.reconnect()
        _wait_served(wire, cluster.members.index(follower))
        disarm_all(wire)
        must_put(wire, "after")
        assert alarms_of(wire) == []


@pytest.mark.long
def test_a_member_with_changed_records_does_not_start() -> None:
    flags = ["--feature-gates", "InitialCorruptCheck=true", "--backend-batch-interval", "10ms"]
    with Cluster(RAFTKV, size=3, flags=flags) as cluster, Wire(cluster.endpoints) as wire:
        for number in range(20):
            must_put(wire, f"k{number}", b"untouched")
        member = cluster.members[2]
        member.stop()
        corrupt(member, b"untouched", b"disturbed")
        member.start()
        assert wait_for_end(member) == 1
        assert "found data inconsistency with peers at revision 21" in log_of(member).splitlines()[-1]
        corrupt(member, b"disturbed", b"untouched")
        member.start()
        cluster.wait_ready()
        wire.reconnect()
        assert checks(member, "start", "equal") == 1
        assert value_of(wire, "k1", 2) == b"untouched"
