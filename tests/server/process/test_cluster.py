"""Three real members: leadership transfers, deaths, databases sent to lagging members, the quota."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from raftkv.pb import rpc_pb2
from tests.compat.wire import Wire
from tests.procs import RAFTKV, Cluster, Member, wait_for
from tests.server.process.process import (
    COMPACT,
    DELETE,
    NO_SPACE,
    PUT,
    alarms_of,
    disarm_all,
    leader_of,
    log_of,
    must_put,
    put,
    start_quietly,
    status_of,
    value_of,
    wait_for_end,
    wait_for_equal_hashes,
)

ELECTION_S = 2.0
QUOTA_BYTES = 12 * 1024 * 1024
FLAGS = [
    *("--snapshot-count", "50", "--snapshot-catchup-entries", "10"),
    *("--quota-backend-bytes", str(QUOTA_BYTES)),
    *("--log-level", "debug"),
    *("--election-timeout", str(round(ELECTION_S * 1000))),
]


@dataclass(frozen=True)
class Three:
    """The cluster and connections to its members."""

    cluster: Cluster
    wire: Wire

    @property
    def leader(self) -> int:
        return self.leader_as_seen_by(0)

    def leader_as_seen_by(self, member: int) -> int:
        wait_for(lambda: leader_of(self.wire, member) >= 0, "a leader")
        return leader_of(self.wire, member)

    def follower(self) -> int:
        return (self.leader + 1) % 3

    def ready(self) -> None:
        """Wait for all, and talk to them over new connections."""
        self.cluster.wait_ready()
        self.wire.reconnect()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(RAFTKV, size=3, flags=FLAGS) as cluster:
        yield cluster


@pytest.fixture
def three(cluster: Cluster) -> Iterator[Three]:
    """The cluster, whole again after what the test before did to it."""
    for member in cluster.members:
        if member.environment:
            member.kill()
            member.environment = {}
        if not member.is_running():
            member.start()
    cluster.wait_ready()
    with Wire(cluster.endpoints) as wire:
        yield Three(cluster, wire)


@pytest.mark.long
def test_a_leader_that_is_asked_to_stop_hands_over(three: Three) -> None:
    """The next leader leads before the old one has ended, and the status is that of the signal."""
    old = three.leader
    other = (old + 1) % 3
    must_put(three.wire, "before", member=other)
    term = status_of(three.wire, other).raftTerm
    member = three.cluster.members[old]
    assert member.process is not None
    member.process.send_signal(signal.SIGTERM)
    wait_for(lambda: status_of(three.wire, other).raftTerm > term and leader_of(three.wire, other) not in (-1, old),
             "a new leader")  # fmt: skip
    must_put(three.wire, "after", member=other)
    assert wait_for_end(member) == -signal.SIGTERM
    # It ended as a follower: without a hand-over the others elect a leader when it is gone.
    assert f") became leader in term {term + 1}, " in log_of(member)
    member.start()
    three.ready()
    assert value_of(three.wire, "after", old) == b"v"


@pytest.mark.long
def test_an_interrupted_follower_ends_as_its_signal(three: Three) -> None:
    member = three.cluster.members[three.follower()]
    assert member.process is not None
    member.process.send_signal(signal.SIGINT)
    assert wait_for_end(member) == -signal.SIGINT
    member.start()
    three.ready()


def _fall_behind(three: Three, member: Member) -> int:
    """Kill a member and write until none of the others, each of which may lead later, has the entries that it lacks."""
    member.kill()
    alive = (three.cluster.members.index(member) + 1) % 3
    lacking = status_of(three.wire, alive).raftIndex
    others = [other for other in three.cluster.members if other is not member]
    written = []

    def is_cut() -> bool:
        written.append(must_put(three.wire, f"behind{len(written)}", bytes(200), alive))
        cuts = [re.findall(r"truncated the log before entry (\d+)", log_of(other)) for other in others]
        return all(indexes and int(indexes[-1]) > lacking + 1 for indexes in cuts)

    wait_for(is_cut, "the others to cut their logs")
    return written[-1]


def _files_of(member: Member) -> list[str]:
    return sorted(path.name for path in (member.data_dir / "member" / "snap").iterdir())


# In the order in which a receiver comes by them, and whether the log says by then that the received database holds.
RECEIVING = {
    "snapshotAfterPiece": False,
    "snapshotBeforeRename": False,
    "snapshotAfterRename": False,
    "raftBeforeSaveSnap": False,
    "raftAfterSaveSnap": True,
    "raftBeforeApplySnap": True,
    "applyBeforeOpenSnapshot": True,
    "replaceBeforeRename": True,
    "raftAfterApplySnap": False,  # in place: nothing is left to be finished
}


@pytest.mark.long
@pytest.mark.parametrize("point", RECEIVING)
def test_a_receiver_killed_while_it_installs(three: Three, point: str) -> None:
    position = three.follower()
    member = three.cluster.members[position]
    revision = _fall_behind(three, member)
    started_at = len(log_of(member))
    member.environment = {"RAFTKV_FAILPOINTS": f"{point}=panic"}
    member.start()
    assert wait_for_end(member) == 66
    assert f"failpoint {point}: panic" in log_of(member)[started_at:].splitlines()
    member.environment = {}
    member.start()
    three.ready()
    wait_for_equal_hashes(three.wire, revision)
    # The leader hears that the member is as far as that, and keeps no copy for it any more.
    wait_for_equal_hashes(three.wire, must_put(three.wire, "after"))
    assert ("finishing an interrupted installation of a snapshot" in log_of(member)[started_at:]) == RECEIVING[point]
    assert value_of(three.wire, "behind0", position, serializable=True) == bytes(200)
    assert _files_of(member) == ["applied", "db", "db-lock"]


@pytest.mark.long
@pytest.mark.parametrize("point", ["snapshotBeforeCopySync", "snapshotBeforeSend"])
def test_a_sender_killed_before_it_sends(three: Three, point: str) -> None:
    member = three.cluster.members[three.follower()]
    revision = _fall_behind(three, member)
    others = [other for other in three.cluster.members if other is not member]
    for other in others:
        other.kill()
        other.environment = {"RAFTKV_FAILPOINTS": f"{point}=panic"}
        other.start()
    member.start()
    wait_for(lambda: not all(other.is_running() for other in others), "the end of the sender")
    for other in others:
        other.kill()
        other.environment = {}
        other.start()
    three.ready()
    wait_for_equal_hashes(three.wire, revision)
    for other in three.cluster.members:
        assert _files_of(other) == ["applied", "db", "db-lock"]


@pytest.mark.long
def test_the_quota(three: Three) -> None:
    """Full on one is full on all; deleting, compacting and disarming makes room without any defragmentation."""
    follower = three.follower()
    value = bytes(range(256)) * 2048  # 512 KiB
    answers = []
    for number in range(100):
        answers.append(put(three.wire, f"full{number}", value, follower))
        if answers[-1].code != "OK":
            break
    assert (answers[-1].code, answers[-1].text) == NO_SPACE
    assert 5 < len(answers) < 60
    wait_for(lambda: all(alarms_of(three.wire, member) for member in range(3)), "the alarm on all")
    assert alarms_of(three.wire)[0][1] == "NOSPACE"
    for member in range(3):
        assert (put(three.wire, "more", b"", member).code, put(three.wire, "more").text) == NO_SPACE
        assert "alarm:NOSPACE " in str(status_of(three.wire, member).errors)
        assert "the NOSPACE alarm of member " in log_of(three.cluster.members[member]), "each log names it"
    assert value_of(three.wire, "full0", follower) == value
    deleted = three.wire.call(DELETE, rpc_pb2.DeleteRangeRequest(key=b"full", range_end=b"fulm"))
    assert deleted.message.deleted == len(answers) - 1
    compacted = three.wire.call(COMPACT, rpc_pb2.CompactionRequest(revision=deleted.revision, physical=True))
    assert compacted.code == "OK", compacted

    def has_room() -> bool:
        return all(status_of(three.wire, member).dbSizeInUse < QUOTA_BYTES // 2 for member in range(3))

    wait_for(has_room, "room on all members")
    disarm_all(three.wire)
    revision = must_put(three.wire, "room", value)
    assert not any(alarms_of(three.wire, member) for member in range(3))
    wait_for_equal_hashes(three.wire, revision)


@pytest.mark.long
def test_a_member_whose_sync_fails_leaves_the_others_serving(three: Three) -> None:
    position = three.follower()
    member = three.cluster.members[position]
    member.kill()
    member.environment = {"RAFTKV_FAILPOINTS": "walBeforeSync=after-10 error"}
    member.start()
    other = (position + 1) % 3

    def has_ended() -> bool:
        must_put(three.wire, "eio", member=other)
        return not member.is_running()

    wait_for(has_ended, "the member to end")
    assert wait_for_end(member) == 1
    assert log_of(member).rstrip().splitlines()[-1].startswith("raftkv: stopped: ")
    member.environment = {}
    member.start()
    three.ready()
    wait_for_equal_hashes(three.wire, must_put(three.wire, "eio"))


@pytest.mark.long
def test_a_member_of_another_cluster_is_refused() -> None:
    """A wrong token makes another cluster of the same members: it never joins, and the two others serve."""
    cluster = Cluster(RAFTKV, size=3)
    stranger = cluster.members[2]
    stranger.flags += ["--initial-cluster-token", "another"]
    start_quietly(cluster)
    try:
        with Wire(cluster.endpoints) as wire:
            for member in cluster.members[:2]:
                member.wait_ready()
            must_put(wire, "a", member=0)
            refusal = "rejected a peer connection from "
            wait_for(lambda: all(refusal in log_of(member) for member in cluster.members[:2]), "the refusal")
            assert "is not ours" in log_of(cluster.members[0])
            assert status_of(wire, 2).leader == 0
            assert wire.call(PUT, rpc_pb2.PutRequest(key=b"b"), 2, [("hasleader", "true")]).text == (
                "etcdserver: no leader"
            )
            assert value_of(wire, "a", 1) == b"v"
            assert stranger.is_running()
    finally:
        cluster.close()
