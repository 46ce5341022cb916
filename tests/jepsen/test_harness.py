"""Parts of the harness other than checkers: errors, schedules, the wire, the disk, the figures."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from jepsen import wire
from jepsen.__main__ import duration_s, main
from jepsen.db import Cluster, DbError, Settings, filesystem_of, free_ports, require_disk
from jepsen.endpoints import Endpoints
from jepsen.faults import clocks, nemesis
from jepsen.faults.members import Change
from jepsen.history import History, save
from jepsen.ops import Request, TxnResult, decode, did_write, encode, may_write
from jepsen.outcome import classify
from jepsen.probe import Probe
from jepsen.runner import RUNS, quantile
from raftkv.pb import rpc_pb2
from tests.jepsen.story import Compare, Delete, DeleteResult, Put, Range, Story, Txn, found, kv

REQUESTS: list[Request] = [
    Put("k", "v"),
    Put("k", "v", previous=True),
    Range("k"),
    Range("a", "z", rev=7, serializable=True),
    Delete("k", "l", previous=True),
    Txn((Compare("k", "mod", ">", 3), Compare("j", "value", "!=", "x")), (Put("k", "v"), Range("k")), (Delete("k"),)),
]


@pytest.mark.parametrize(
    ("code", "text", "definite"),
    [
        ("INVALID_ARGUMENT", "etcdserver: key is not provided", True),
        ("OUT_OF_RANGE", "etcdserver: mvcc: required revision has been compacted", True),
        ("UNKNOWN", "etcdserver: too many requests", True),
        ("UNAVAILABLE", "failed to connect to all addresses; last error: connection refused", True),
        ("UNKNOWN", "etcdserver: key is not provided", False),
        ("INVALID_ARGUMENT", "etcdserver: key is not provided, it seems", False),
        ("UNAVAILABLE", "Socket closed", False),
        ("UNAVAILABLE", "etcdserver: leader changed", False),
        ("UNAVAILABLE", "etcdserver: request timed out", False),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", False),
        ("INTERNAL", "anything", False),
    ],
)
def test_a_failed_write_is_in_doubt_unless_the_table_says_otherwise(code: str, text: str, definite: bool) -> None:
    assert classify(code, text, writes=True).definite is definite
    assert classify(code, text, writes=False).definite


@pytest.mark.parametrize("request_", REQUESTS)
def test_requests_survive_json(request_: Request) -> None:
    assert decode(encode(request_)) == request_


def test_writing_operations_are_known() -> None:
    assert [may_write(request) for request in REQUESTS] == [True, True, False, False, True, True]
    assert did_write(Delete("k"), DeleteResult(1))
    assert not did_write(Delete("k"), DeleteResult(0))
    assert not did_write(REQUESTS[-1], TxnResult(False, (DeleteResult(0),)))


def test_txn_on_the_wire() -> None:
    message = wire.request_message(REQUESTS[-1])
    assert [(guard.result, guard.target) for guard in message.compare] == [(1, 2), (3, 3)]
    assert message.compare[0].mod_revision == 3
    assert message.compare[1].value == b"x"
    assert [op.WhichOneof("request") for op in message.success] == ["request_put", "request_range"]
    response = rpc_pb2.TxnResponse(succeeded=False)
    response.responses.add().response_delete_range.deleted = 2
    assert wire.result_of(REQUESTS[-1], response) == TxnResult(False, (DeleteResult(2),))


def test_range_on_the_wire() -> None:
    message = wire.request_message(REQUESTS[3])
    assert (message.key, message.range_end, message.revision, message.serializable) == (b"a", b"z", 7, True)
    response = rpc_pb2.RangeResponse()
    response.kvs.add(key=b"k", value=b"v", create_revision=2, mod_revision=3, version=2)
    assert wire.result_of(REQUESTS[3], response) == found(kv("k", "v", 3, 2, 2))


def test_a_schedule_is_its_seed_and_has_every_fault_each_round() -> None:
    wanted = nemesis.parse("kill,pause-leader", 3)
    first = list(itertools.islice(nemesis.schedule(wanted, 4), 12))
    assert first == list(itertools.islice(nemesis.schedule(wanted, 4), 12))
    assert first != list(itertools.islice(nemesis.schedule(wanted, 5), 12))
    for round_ in (first[:6], first[6:]):
        assert sorted((step.fault, step.target) for step in round_) == sorted(wanted)


def test_changes_of_members_keep_their_order_among_other_faults() -> None:
    wanted = nemesis.parse("kill,member", 1)
    orders = set()
    for seed in range(5):
        names = [(step.fault, step.target) for step in itertools.islice(nemesis.schedule(wanted, seed), len(wanted))]
        assert [target for fault, target in names if fault == "member"] == list(Change.targets)
        orders.add(tuple(names))
    assert len(orders) > 1


def test_clients_continue_at_listed_members(tmp_runs: Path) -> None:
    cluster = Cluster(tmp_runs / "c", Settings(size=3))
    first, second, third = cluster.members
    answer = rpc_pb2.MemberListResponse()
    answer.members.add(ID=2, clientURLs=[f"http://{second.address}"])
    answer.members.add(ID=3, clientURLs=[f"http://{third.address}"], isLearner=True)

    class Answers(Probe):
        async def ask(self, *_arguments: Any, **_options: Any) -> Any:
            over.set()
            return answer

    endpoints = Endpoints(cluster, Answers(cluster))
    seat, everyone, over = endpoints.seat(2), endpoints.round_from(1), asyncio.Event()
    assert (seat, everyone) == ([third], [second, third, first])
    asyncio.run(endpoints.follow(over))
    assert (seat, everyone) == ([second], [second]), "a learner serves no clients"


def test_replacement_keeps_only_the_peer_url(tmp_runs: Path) -> None:
    cluster = Cluster(tmp_runs / "c", Settings(size=3))
    lost = cluster.members[1]
    cluster.let_go(lost)
    fresh = asyncio.run(cluster.new_member(lost))
    assert (fresh.number, fresh.peer_address) == (4, lost.peer_address)
    assert fresh.address != lost.address
    assert fresh.folder != lost.folder
    assert lost not in cluster.members


def test_a_cluster_of_one_has_one_target() -> None:
    assert nemesis.parse("kill,pause", 1) == [("kill", "all"), ("pause", "all")]
    assert ("kill", "leader") in nemesis.parse("kill,member-five", 1), "it does not stay one"
    assert nemesis.parse("", 3) == []


def test_a_failover_is_counted_only_when_nothing_else_was_down() -> None:
    kill = {"event": "kill", "at": 5, "target": "leader", "leader": True, "calm": True}
    others = [kill | {"calm": False}, kill | {"leader": False}, kill | {"target": "all"}, kill | {"event": "pause"}]
    assert nemesis.leader_losses([*others, kill]) == [5]


@pytest.mark.parametrize("names", ["flood", "kill-everyone", "wipe-leader"])
def test_unknown_faults_are_refused(names: str) -> None:
    with pytest.raises(ValueError, match="unknown nemesis"):
        nemesis.parse(names, 3)


@pytest.mark.long
def test_a_clock_jumps_and_is_set_right_again(tmp_runs: Path) -> None:
    """libfaketime reads the file; the offset persists over restarts of the member."""
    cluster = Cluster(tmp_runs / "c", Settings(size=3))
    hit, other = cluster.members[:2]
    for member in (hit, other):
        variables = clocks.environment(member, "/lib/faketime.so")
        assert variables["LD_PRELOAD"] == "/lib/faketime.so"
        assert Path(variables["FAKETIME_TIMESTAMP_FILE"]) == member.folder / "clock"
    for name, offset in (("ahead", "+3h"), ("behind", "-3h")):
        fault = nemesis.FAULTS[name]()
        fault.inject(cluster, [hit])
        clocks.environment(hit, "/lib/faketime.so")
        assert [(member.folder / "clock").read_text() for member in (hit, other)] == [offset, "+0"]
        fault.heal(cluster, [hit])
        assert (hit.folder / "clock").read_text() == "+0"
    assert "FAKETIME_TIMESTAMP_FILE" in nemesis.environment("kill,clock")(hit)
    assert nemesis.environment("kill,network")(hit) == {}


def test_durability_is_not_tested_in_memory() -> None:
    require_disk(RUNS.parent)
    assert filesystem_of(Path("/proc/self")) == "proc"
    assert filesystem_of(Path("/dev/shm/x")) == "tmpfs"
    with pytest.raises(DbError, match="tmpfs"):
        require_disk(Path("/dev/shm"))


def test_ports_are_outside_the_range_of_outgoing_connections() -> None:
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = free_ports(6)
    assert len(set(ports)) == 6
    assert max(ports) < low


def test_the_lives_of_members_are_of_each_build_in_turn(tmp_runs: Path) -> None:
    others = (f"{sys.executable} -I -m raftkv", f"{sys.executable} -s -m raftkv")
    cluster = Cluster(tmp_runs / "c", Settings(size=2, others=others))
    builds: dict[str, list[str]] = {}
    try:
        for _ in range(3):
            cluster.start(cluster.members)
            for member in cluster.members:
                assert member.process is not None
                words = cast("list[str]", member.process.args)
                builds.setdefault(member.name, []).append(words[words.index("-m") - 1])
            cluster.kill(cluster.members)
    finally:
        cluster.close()
    assert builds == {"m1": ["-s", sys.executable, "-I"], "m2": [sys.executable, "-I", "-s"]}


def test_running_members_are_neither_started_nor_wiped(tmp_runs: Path) -> None:
    cluster = Cluster(tmp_runs / "c", Settings(system="etcd", size=1))
    member = cluster.members[0]
    cluster.start([member])
    try:
        with pytest.raises(DbError):
            cluster.start([member])
        with pytest.raises(DbError):
            cluster.wipe(member)
    finally:
        cluster.close()
    assert not member.up
    assert cluster.died() == []


def test_quantiles_are_nearest_ranks() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [quantile(values, share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
    assert quantile([3.0], 0.99) == 3.0
    assert quantile([], 0.5) is None


def test_durations() -> None:
    assert [duration_s(text) for text in ("30s", "500ms", "1.5m", "1h")] == [30.0, 0.5, 90.0, 3600.0]
    with pytest.raises(argparse.ArgumentTypeError):
        duration_s("soon")


def test_a_kept_history_is_checked_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = Story(Put("k", "a")).write(2, 0, 1).read("k", 1, 2, 3)
    quiet = {"event": "hashes", "at": 9, "rev": 2, "members": {"m1": [1, -1]}}
    save(History(story.operations, [quiet], story.store), tmp_path / "bad.jsonl")
    assert main(["check", str(tmp_path / "bad.jsonl")]) == 1
    assert "real time" in capsys.readouterr().out
    save(History(story.operations[:1], [quiet], story.store), tmp_path / "good.jsonl")
    assert main(["check", str(tmp_path / "good.jsonl")]) == 0


def test_command_line_refuses_unknown_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--workload", "nothing"]) == 2
    assert main(["run", "--nemesis", "flood"]) == 2
    assert "unknown" in capsys.readouterr().err
