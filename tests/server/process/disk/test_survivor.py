"""--force-new-cluster on real processes: the data stays, former members are removed for good, new ones can join."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from raftkv.pb import rpc_pb2
from tests.compat.wire import Wire
from tests.procs import RAFTKV, Cluster, Member, free_port, wait_for
from tests.server.process.process import log_of, must_put, start_to_end, value_of, wait_for_end

LIST = "etcdserverpb.Cluster/MemberList"
ADD = "etcdserverpb.Cluster/MemberAdd"


@pytest.fixture
def lost() -> Iterator[Cluster]:
    """Three members with a key, all killed."""
    with Cluster(RAFTKV, size=3) as cluster:
        with Wire(cluster.endpoints) as wire:
            must_put(wire, "k", b"kept")
            wait_for(lambda: value_of(wire, "k", member=2, serializable=True) == b"kept", "the key on the survivor")
        for member in cluster.members:
            member.kill()
        yield cluster


def names(wire: Wire) -> list[str]:
    listed = wire.call(LIST, rpc_pb2.MemberListRequest(linearizable=True)).message.members
    return sorted(member.name for member in listed)


@pytest.mark.long
def test_survivor_continues_alone_and_accepts_members(lost: Cluster) -> None:
    survivor, former = lost.members[2], lost.members[0]
    survivor.flags.append("--force-new-cluster")
    survivor.restart()
    assert "this member is now a cluster of one, from entry" in log_of(survivor)
    with Wire([survivor.endpoint]) as wire:
        assert names(wire) == ["m2"]
        assert value_of(wire, "k") == b"kept"
        must_put(wire, "k", b"alone")
    survivor.kill()
    survivor.flags.remove("--force-new-cluster")
    survivor.restart()
    with Wire([survivor.endpoint]) as wire:
        assert value_of(wire, "k") == b"alone"
        ended = start_to_end(former)
        assert "the member has been permanently removed from the cluster" in ended.output
        fresh = Member("fresh", lost.directory, client_port=free_port(), peer_port=free_port(), server=RAFTKV)
        assert wire.call(ADD, rpc_pb2.MemberAddRequest(peerURLs=[fresh.peer_url])).code == "OK"
        fresh.initial_cluster = f"m2={survivor.peer_url},fresh={fresh.peer_url}"
        fresh.flags = ["--initial-cluster-state", "existing"]
        lost.members.append(fresh)
        fresh.restart()
        assert names(wire) == ["fresh", "m2"]
        with Wire([fresh.endpoint]) as other:
            assert value_of(other, "k") == b"alone"


@pytest.mark.long
def test_member_never_continues_alone_beside_quorum() -> None:
    """The survivor told the two that run that they were removed, and both stopped for good."""
    with Cluster(RAFTKV, size=3) as cluster, Wire(cluster.endpoints) as wire:
        must_put(wire, "k")
        forced = cluster.members[2]
        forced.kill()
        forced.flags.append("--force-new-cluster")
        line = start_to_end(forced).one_line()
        assert "m0, m1 run" in line
        assert "start it without --force-new-cluster" in line
        must_put(wire, "k")


STEPS = ["walBeforeWrite", "walAfterWrite", "walAfterSync", "afterApplyOneConfChange"]


@pytest.mark.long
@pytest.mark.parametrize("step", STEPS)
def test_a_kill_at_any_step_is_finished_by_the_next_start(lost: Cluster, step: str) -> None:
    survivor = lost.members[2]
    survivor.environment = {"RAFTKV_FAILPOINTS": f"{step}=panic"}
    survivor.flags.append("--force-new-cluster")
    survivor.start()
    assert wait_for_end(survivor) == 66
    survivor.environment = {}
    survivor.restart()
    with Wire([survivor.endpoint]) as wire:
        assert names(wire) == ["m2"]
        assert value_of(wire, "k") == b"kept"
