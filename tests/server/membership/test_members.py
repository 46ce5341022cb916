"""Real processes: members are added and removed while clients write; wrong ones are refused in one line."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import raftkv
from raftkv.config import ServerConfig
from raftkv.errors import MemberRemovedError
from raftkv.offline.etcd.restore import restore
from raftkv.pb import rpc_pb2
from raftkv.storage.failpoints import ENVIRONMENT, PANIC_EXIT_STATUS
from tests.compat.wire import Answer, Wire
from tests.procs import RAFTKV, Cluster, Member, free_port, wait_for
from tests.server.process.process import (
    log_of,
    must_put,
    start_to_end,
    status_of,
    value_of,
    wait_for_end,
    wait_for_equal_hashes,
)

FAST = ["--strict-reconfig-check=false", "--max-learners=2"]
"""Without the five seconds that members must be connected before the next change."""


def call(wire: Wire, name: str, request: Any, member: int = 0) -> Answer:
    return wire.call(f"etcdserverpb.Cluster/Member{name}", request, member)


def members_of(wire: Wire, member: int = 0) -> dict[str, rpc_pb2.Member]:
    """The members by name; those not started yet by URL."""
    answer = call(wire, "List", rpc_pb2.MemberListRequest(linearizable=True), member)
    assert answer.code == "OK", answer
    return {found.name or found.peerURLs[0]: found for found in answer.message.members}


def new_member(cluster: Cluster, number: int, *flags: str) -> Member:
    """A member with ports of its own, not added and not started."""
    return Member(
        name=f"m{number}",
        directory=cluster.directory,
        client_port=free_port(),
        peer_port=free_port(),
        flags=[*FAST, "--initial-cluster-state=existing", *flags],
        server=RAFTKV,
    )


def add(wire: Wire, member: Member, learner: bool = False, asked: int = 0) -> Answer:
    """Ask for a member, and give it the settings that the answer says."""
    answer = call(wire, "Add", rpc_pb2.MemberAddRequest(peerURLs=[member.peer_url], isLearner=learner), asked)
    if answer.code == "OK":
        added = answer.message.member.ID
        member.initial_cluster = ",".join(
            f"{member.name if added == found.ID else found.name}={url}"
            for found in answer.message.members
            for url in found.peerURLs
        )
    return answer


def join(cluster: Cluster, wire: Wire, member: Member, learner: bool = False, asked: int = 0) -> None:
    """Add a member, start it and wait until it serves."""
    answer = add(wire, member, learner, asked)
    assert answer.code == "OK", answer
    member.start()
    cluster.members.append(member)
    member.wait_ready()


def remove(wire: Wire, name: str, asked: int = 0) -> Answer:
    found = members_of(wire, asked)[name]
    return call(wire, "Remove", rpc_pb2.MemberRemoveRequest(ID=found.ID), asked)


class Writer:
    """Writes a counter on a thread, by a client that goes on at the next endpoint."""

    def __init__(self, endpoints: list[str]) -> None:
        self._endpoints = endpoints
        self.acknowledged: list[int] = []
        self.failures: list[BaseException] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with raftkv.connect(self._endpoints) as kv:
            number = 0
            while not self._stop.is_set():
                try:
                    kv.put(f"w/{number}", str(number))
                    self.acknowledged.append(number)
                except raftkv.RaftKVError as error:
                    self.failures.append(error)  # in doubt: it counts as not acknowledged
                number += 1

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def check(self, endpoint: str) -> None:
        """No acknowledged write is lost."""
        with raftkv.connect(endpoint) as kv:
            found = {int(item.value) for item in kv.range("w/", prefix=True)}
        assert self.acknowledged
        assert set(self.acknowledged) <= found


@pytest.mark.long
def test_one_member_becomes_three_loses_its_founder_and_a_stale_one_stays_out() -> None:
    with Cluster(RAFTKV, flags=FAST) as cluster:
        founder, second, third = cluster.members[0], new_member(cluster, 1), new_member(cluster, 2)
        endpoints = [founder.endpoint, second.endpoint, third.endpoint]
        with Wire(endpoints) as wire:
            must_put(wire, "k", b"before")
            with Writer(endpoints) as writer:
                join(cluster, wire, second)
                join(cluster, wire, third)
                assert sorted(members_of(wire)) == ["m0", "m1", "m2"]
                # One that is away when it is removed learns it from the others, and so on each start with its old data.
                third.kill()
                assert remove(wire, "m2").code == "OK"
                for _ in range(2):
                    assert start_to_end(third).one_line(0).startswith(f"raftkv: {MemberRemovedError.text}: member ")
                # The leader hands over before it goes.
                assert remove(wire, "m0", asked=1).code == "OK"
                assert wait_for_end(founder) == 0
                acknowledged = len(writer.acknowledged)
                wait_for(lambda: len(writer.acknowledged) > acknowledged + 10, "writes without the founder")
            assert MemberRemovedError.text in "\n".join(log_of(founder).splitlines()[-3:])  # then a slow turn, perhaps
            assert start_to_end(founder).one_line(0).startswith(f"raftkv: {MemberRemovedError.text}: member ")
            assert value_of(wire, "k", 1) == b"before"
            writer.check(second.endpoint)
            assert list(members_of(wire, 1)) == ["m1"]
            refusals = [line for line in log_of(second).splitlines() if "was removed" in line]
            assert len(refusals) <= 2, refusals


@pytest.fixture(scope="module")
def one() -> Iterator[tuple[Cluster, Wire]]:
    """One member, to which each test adds what it removes again."""
    with Cluster(RAFTKV, flags=FAST) as cluster, Wire(cluster.endpoints) as wire:
        must_put(wire, "k", b"v")
        yield cluster, wire


@pytest.mark.long
def test_a_learner_follows_serves_no_writes_and_is_promoted_when_it_has_the_log(one: tuple[Cluster, Wire]) -> None:
    cluster, wire = one
    learner = new_member(cluster, 1)
    join(cluster, wire, learner, learner=True)
    with Wire([learner.endpoint]) as asked:
        assert value_of(asked, "k", serializable=True) == b"v"
        put = asked.call("etcdserverpb.KV/Put", rpc_pb2.PutRequest(key=b"k", value=b"x"))
        assert (put.code, put.text) == ("FAILED_PRECONDITION", "etcdserver: rpc not supported for learner")
        found = members_of(wire)["m1"]
        assert found.isLearner
        promote = rpc_pb2.MemberPromoteRequest(ID=found.ID)
        assert call(asked, "Promote", promote).text == "etcdserver: rpc not supported for learner"
        assert call(wire, "Promote", promote).code == "OK"
        wait_for(lambda: not status_of(asked).isLearner, "the promotion at the promoted one")
        assert call(wire, "Promote", promote).text == "etcdserver: can only promote a learner member"
        must_put(asked, "k", b"v")
        # A member that is asked for another's promotion passes it on to the leader.
        assert call(asked, "Promote", rpc_pb2.MemberPromoteRequest(ID=1)).text == "etcdserver: member not found"
    wait_for_equal_hashes(wire, status_of(wire).header.revision)
    assert remove(wire, "m1").code == "OK"
    assert wait_for_end(learner) == 0


@pytest.mark.long
def test_a_learner_promotes_itself_where_it_was_told_to(one: tuple[Cluster, Wire]) -> None:
    cluster, wire = one
    learner = new_member(cluster, 7, "--auto-promote")
    join(cluster, wire, learner, learner=True)
    wait_for(lambda: not members_of(wire)["m7"].isLearner, "the promotion")
    assert remove(wire, "m7").code == "OK"
    assert wait_for_end(learner) == 0


def test_a_member_that_does_not_fit_is_refused_in_one_line(one: tuple[Cluster, Wire]) -> None:
    cluster, wire = one
    stranger = new_member(cluster, 3)
    founder = cluster.members[0]
    stranger.initial_cluster = f"m0={founder.peer_url},m3={stranger.peer_url}"
    assert "member count is unequal: the cluster has 1" in start_to_end(stranger).one_line()
    other = new_member(cluster, 9)
    assert add(wire, other, learner=True).code == "OK"
    assert "PeerURLs: no match found for existing member (" in start_to_end(stranger).one_line()
    stranger.initial_cluster = f"m0=http://127.0.0.1:1,m3={stranger.peer_url}"
    line = start_to_end(stranger).one_line()
    assert "could not retrieve cluster information from the given URLs (http://127.0.0.1:1: " in line
    assert not stranger.data_dir.exists()
    assert remove(wire, other.peer_url).code == "OK"


@pytest.mark.long
def test_a_member_whose_data_is_lost_does_not_come_back_under_its_id(one: tuple[Cluster, Wire]) -> None:
    cluster, wire = one
    member = new_member(cluster, 4)
    join(cluster, wire, member, learner=True)
    member.kill()
    # With its data the flags are ignored.
    flags, member.initial_cluster = member.initial_cluster, "m4=http://127.0.0.1:1"
    member.restart()
    member.kill()
    member.initial_cluster = flags
    shutil.rmtree(member.data_dir)
    line = start_to_end(member).one_line()
    assert "has already been bootstrapped, and its data is not in" in line
    assert remove(wire, "m4").code == "OK"
    # Under a new id it may.
    join(cluster, wire, member, learner=True)
    with Wire([member.endpoint]) as asked:
        assert value_of(asked, "k", serializable=True) == b"v"
    assert remove(wire, "m4").code == "OK"
    assert wait_for_end(member) == 0


def test_a_member_may_be_removed_and_added_again_within_a_second(one: tuple[Cluster, Wire]) -> None:
    cluster, wire = one
    member = new_member(cluster, 9)
    for _ in range(20):
        assert add(wire, member, learner=True).code == "OK"
        assert remove(wire, member.peer_url).code == "OK"


@pytest.mark.long
@pytest.mark.parametrize("point", ["beforeApplyOneConfChange", "afterApplyOneConfChange"])
def test_killed_in_the_middle_of_a_change(point: str) -> None:
    """It was committed, so at the next start it is finished."""
    with Cluster(RAFTKV, flags=FAST) as cluster, Wire(cluster.endpoints) as wire:
        member, learner = cluster.members[0], new_member(cluster, 1)
        member.kill()
        member.environment = {ENVIRONMENT: f"{point}=panic"}
        member.restart()
        wire.reconnect()
        assert add(wire, learner, learner=True).code != "OK"
        assert wait_for_end(member) == PANIC_EXIT_STATUS
        member.environment = {}
        member.restart()
        wire.reconnect()
        assert sorted(found.isLearner for found in members_of(wire).values()) == [False, True]
        # In the same second the new id is the old one too.
        used = ("etcdserver: Peer URLs already exists", "etcdserver: member ID already exist")
        assert add(wire, learner, learner=True).text in used
        must_put(wire, "k")


@pytest.mark.long
def test_a_founder_whose_data_is_lost_does_not_found_the_cluster_again():
    with Cluster(RAFTKV, size=3, flags=FAST) as cluster, Wire(cluster.endpoints) as wire:
        wait_for(lambda: all(found.clientURLs for found in members_of(wire).values()), "all members to be known")
        lost = cluster.members[2]
        lost.kill()
        shutil.rmtree(lost.data_dir)
        assert "has already been bootstrapped, and its data is not in" in start_to_end(lost).one_line()
        must_put(wire, "k")


@pytest.mark.long
def test_readded_founder_is_told_the_wrong_flag() -> None:
    """Else it would start as the member that was removed, and be told, again and again, to remove its data."""
    with Cluster(RAFTKV, size=3, flags=FAST) as cluster, Wire(cluster.endpoints[:2]) as wire:
        wait_for(lambda: all(found.clientURLs for found in members_of(wire).values()), "all members to be known")
        lost = cluster.members[2]
        lost.kill()
        shutil.rmtree(lost.data_dir)
        assert remove(wire, lost.name).code == "OK"
        wait_for(lambda: add(wire, lost, learner=False).code == "OK", "both others to be connected for a while")
        line = start_to_end(lost).one_line()
        assert " was removed from the cluster, and " in line
        assert line.rstrip().endswith(" was added in its place: start it with --initial-cluster-state existing")
        assert not lost.data_dir.exists()
        lost.flags = [*lost.flags, "--initial-cluster-state", "existing"]
        lost.restart()
        wait_for(lambda: members_of(wire)[lost.name].clientURLs, "the new member to be known")


def _put_snapshot_in_place(lost: Member, snapshot: Path) -> None:
    """Lose the data of a member, and put an old snapshot in its place, as one does by hand."""
    lost.kill()
    shutil.rmtree(lost.data_dir)
    config = ServerConfig(
        name=lost.name,
        data_dir=str(lost.data_dir),
        initial_cluster=lost.initial_cluster,
        initial_cluster_token=lost.token,
        initial_advertise_peer_urls=(lost.peer_url,),
    )
    restore(snapshot, config)


@pytest.mark.long
def test_a_snapshot_restored_beside_running_members_is_refused(tmp_path: Path) -> None:
    """The member took part, and applied entries of the snapshot a second time, to other revisions."""
    with Cluster(RAFTKV, size=3, flags=FAST) as cluster, Wire(cluster.endpoints) as wire:
        must_put(wire, "k")
        wait_for(lambda: all(found.clientURLs for found in members_of(wire).values()), "all members to be known")
        with raftkv.connect(cluster.endpoints[0]) as kv:
            kv.snapshot(tmp_path / "old.db")
        must_put(wire, "after")
        lost = cluster.members[2]
        _put_snapshot_in_place(lost, tmp_path / "old.db")
        line = start_to_end(lost).one_line()
        assert "was restored from a snapshot" in line
        assert "raftkvctl member remove" in line
        # A restore of all members has the same ids: none of them runs, so they may begin.
        for member in cluster.members:
            _put_snapshot_in_place(member, tmp_path / "old.db")
        for member in cluster.members:
            member.start()
        for member in cluster.members:
            member.wait_ready()
        wire.reconnect()
        wait_for_equal_hashes(wire, must_put(wire, "restored"))
