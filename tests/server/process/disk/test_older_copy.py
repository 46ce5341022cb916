"""A member whose data is replaced by an older copy of it stops, and so does one that still has what the others lost."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from raftkv.pb import rpc_pb2
from tests.compat.wire import Wire
from tests.procs import RAFTKV, Cluster, Member, wait_for
from tests.server.process.process import leader_of, log_of, must_put, status_of, value_of, wait_for_end

pytestmark = pytest.mark.long

MOVE_LEADER = "etcdserverpb.Maintenance/MoveLeader"


def _copy(source: Path, target: Path) -> None:
    subprocess.run(["rm", "-rf", str(target)], check=True)
    # cp keeps the preallocated zeros of the log from taking time.
    subprocess.run(["cp", "-a", "--sparse=always", str(source), str(target)], check=True)


def _kept(member: Member) -> Path:
    return member.data_dir.with_suffix(".kept")


def _last_line(member: Member) -> str:
    assert wait_for_end(member) == 1
    return log_of(member).splitlines()[-1]


def _lead(wire: Wire, number: int) -> None:
    """Make a member the leader, from which another one may take over at any time on a busy machine."""
    wire.reconnect()
    target = status_of(wire, number).header.member_id

    def leads() -> bool:
        leader = leader_of(wire, number)
        if leader not in (-1, number):
            wire.call(MOVE_LEADER, rpc_pb2.MoveLeaderRequest(targetID=target), leader)
        return leader == number

    wait_for(leads, "the leadership of the member")


def test_older_copies_of_data() -> None:
    with Cluster(RAFTKV, size=3) as cluster, Wire(cluster.endpoints) as wire:
        leader, copied, other = cluster.members
        must_put(wire, "before", b"1")
        for member in (copied, other):
            member.stop()
            _copy(member.data_dir, _kept(member))
            if member is copied:
                member.restart()
        _lead(wire, 0)
        must_put(wire, "acknowledged", b"2")
        must_put(wire, "more", b"3")
        other.restart()
        copied.kill()
        # The copy meets a leader that knows nothing of its promises, and the leader before it, which does.
        _lead(wire, 2)
        _copy(_kept(copied), copied.data_dir)
        copied.start()
        line = _last_line(copied)
        assert " runs on an older copy of its data: it had voted in term " in line
        assert "; remove this member and add it again (raftkv join) without the data in " in line

        # Two of three go back while no process remembers: they elect a leader, and their writes differ.
        for member in (leader, other):
            member.kill()
        for member in (copied, other):
            _copy(_kept(member), member.data_dir)
            member.start()
        for member in (copied, other):
            member.wait_ready()
        for number in (1, 2, 1):
            _lead(wire, number)  # terms that the first history does not have
        must_put(wire, "else", b"4", 1)
        assert value_of(wire, "acknowledged", 1) is None
        leader.start()
        line = _last_line(leader)
        assert " was committed here, and " in line
        assert f"; keep the data in {leader.data_dir}: started with another --listen-peer-urls" in line
        assert value_of(wire, "else", 1) == b"4"
