"""Admin.MemberReplace on real processes: a learner replaces a voter, the leader too, in one change."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from raftkv.errors import LearnerNotReadyError
from raftkv.pb import admin_pb2, rpc_pb2
from tests import forked
from tests.compat.wire import Answer, Wire
from tests.procs import RAFTKV, Cluster, Member, free_port, wait_for
from tests.server.process.process import leader_of, log_of, must_put, status_of, value_of, wait_for_end

LIST = "etcdserverpb.Cluster/MemberList"
ADD = "etcdserverpb.Cluster/MemberAdd"
REPLACE = "raftkvpb.Admin/MemberReplace"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(RAFTKV, size=3, flags=["--max-learners", "2"]) as cluster:
        yield cluster


def add_learner(wire: Wire, cluster: Cluster, name: str = "fresh") -> tuple[Member, int]:
    """Start a learner; the member and its id."""
    fresh = Member(name, cluster.directory, client_port=free_port(), peer_port=free_port(), server=RAFTKV)
    request = rpc_pb2.MemberAddRequest(peerURLs=[fresh.peer_url], isLearner=True)
    added: list[Answer] = []

    def is_added() -> bool:
        added.append(wire.call(ADD, request))
        return added[-1].code == "OK"

    wait_for(is_added, "all members to be connected for a while")
    cluster.members.append(fresh)
    fresh.initial_cluster = ",".join(f"{member.name}={member.peer_url}" for member in cluster.members)
    fresh.flags = ["--initial-cluster-state", "existing", "--max-learners", "2"]
    fresh.restart()
    return fresh, added[-1].message.member.ID


def replace(wire: Wire, old: int, new: int, member: int = 0) -> Answer:
    """Ask for it until the leader knows whether the learner has the log."""
    request, answers = admin_pb2.MemberReplaceRequest(old_id=old, new_id=new), list[Answer]()

    def is_answered() -> bool:
        answers.append(wire.call(REPLACE, request, member))
        return answers[-1].text != LearnerNotReadyError.text

    wait_for(is_answered, "the learner to be in sync")
    return answers[-1]


@pytest.mark.long
def test_the_leader_hands_over_and_leaves(cluster: Cluster) -> None:
    with Wire(cluster.endpoints) as wire:
        must_put(wire, "k", b"v")
        fresh, new = add_learner(wire, cluster)
        wait_for(lambda: leader_of(wire) >= 0, "a leader")
        leader = leader_of(wire)
        old = status_of(wire, leader).header.member_id
        other = (leader + 1) % 3
        for wrong in (replace(wire, 7, new, other), replace(wire, old, 7, other)):
            assert (wrong.code, wrong.text) == ("NOT_FOUND", "etcdserver: member not found")
        voter = status_of(wire, other).header.member_id
        refused = replace(wire, old, voter, other)
        assert (refused.code, refused.text) == ("FAILED_PRECONDITION", "etcdserver: can only promote a learner member")
        answer = replace(wire, old, new, other)
        assert answer.code == "OK", answer
        voters = {member.ID for member in answer.message.members if not member.isLearner}
        assert new in voters
        assert old not in voters
        assert len(voters) == 3
        assert wait_for_end(cluster.members[leader]) == 0
        assert "the member has been permanently removed from the cluster" in log_of(cluster.members[leader])
        must_put(wire, "k", b"after", other)
        with Wire([fresh.endpoint]) as joined:
            assert value_of(joined, "k") == b"after"


@pytest.mark.long
def test_the_only_voter_is_replaced() -> None:
    with Cluster(RAFTKV) as single, Wire(single.endpoints) as wire:
        must_put(wire, "k", b"v")
        fresh, new = add_learner(wire, single)
        old = status_of(wire).header.member_id
        program = [sys.executable, "-m", "raftkv.cli.ctl", "--endpoints", single.endpoints[0], "member", "replace"]
        for words, status, output in (
            (["1"], 128, "Error: member replace needs two IDs: the voter that goes and the learner that comes\n"),
            ([f"{old:x}", "7"], 1, "Error: etcdserver: member not found\n"),
            ([f"{old:x}", f"{new:x}"], 0, f"Member {old:16x} replaced by {new:16x} in cluster"),
        ):
            ran = forked.run([*program, *words], timeout_s=90)
            while LearnerNotReadyError.text in ran.stderr:
                ran = forked.run([*program, *words], timeout_s=90)
            assert ran.returncode == status, ran
            assert output in ran.stdout + ran.stderr
        assert wait_for_end(single.members[0]) == 0
        with Wire([fresh.endpoint]) as joined:
            wait_for(lambda: status_of(joined).leader == new, "the new member to lead")
            assert value_of(joined, "k") == b"v"


@pytest.mark.long
def test_a_member_that_was_away_while_all_others_were_replaced_catches_up() -> None:
    """All that it knows are gone, and all that there are it does not know."""
    flags = ["--max-learners", "2", "--strict-reconfig-check=false"]
    with Cluster(RAFTKV, size=3, flags=flags) as cluster, Wire(cluster.endpoints) as wire:
        must_put(wire, "k", b"v")
        ids = [status_of(wire, position).header.member_id for position in (0, 1)]
        away = cluster.members[2]
        away.kill()
        fresh = [add_learner(wire, cluster, name) for name in ("d", "e")]
        with Wire([fresh[0][0].endpoint, cluster.endpoints[1]]) as others:
            assert replace(others, ids[0], fresh[0][1], 1).code == "OK"
            wait_for(lambda: replace(others, ids[1], fresh[1][1], 0).code == "OK", "a leader")
            for member in cluster.members[:2]:
                assert wait_for_end(member) == 0
            must_put(others, "k", b"after")
        away.restart()
        with Wire([away.endpoint]) as joined:
            wait_for(lambda: value_of(joined, "k", serializable=True) == b"after", "the member that was away")


@pytest.mark.long
def test_client_urls_that_change_are_published(cluster: Cluster) -> None:
    moved = cluster.members[1]
    moved.kill()
    moved.flags += ["--advertise-client-urls", "http://moved.example:2379"]
    moved.restart()

    with Wire([cluster.endpoints[0]]) as wire:

        def shown() -> list[str]:
            members = wire.call(LIST, rpc_pb2.MemberListRequest(linearizable=True)).message.members
            return next(list(member.clientURLs) for member in members if member.name == moved.name)

        wait_for(lambda: shown() == ["http://moved.example:2379"], "the new URL")
