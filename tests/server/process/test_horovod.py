"""Horovod's rendezvous on three real members: a recorded init of two ranks, dead members, generations."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

import raftkv
from raftkv.training.records import GenerationRecord, Member, RunKeys, State
from tests.procs import RAFTKV, Cluster
from tests.server.process.horovod_worker import Worker, ask, replay, trace

RUN = RunKeys("team/job")
FLAGS = ["--horovod-run", RUN.run_id, "--host-whitelist", "127.0.0.1"]
ROOT = f"/raftkv/horovod/{RUN.run_id}/"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(RAFTKV, size=3, flags=FLAGS) as cluster:
        yield cluster


@pytest.fixture
def kv(cluster: Cluster) -> Iterator[raftkv.Client]:
    """A client of a cluster whose members all run, and which knows of no run."""
    for member in cluster.members:
        if not member.is_running():
            member.restart()
    with raftkv.connect(cluster.endpoints, timeout_s=30.0) as kv:
        kv.delete("/raftkv/", prefix=True)
        yield kv


def say(endpoint: str, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    """Ask one member until it answers; an election may come at any time."""
    return Worker([endpoint]).ask(method, path, body)


def left(kv: raftkv.Client) -> list[str]:
    """Keys of the rendezvous, without their common root."""
    return [item.key.decode().removeprefix(ROOT) for item in kv.range(ROOT, prefix=True)]


def begin(kv: raftkv.Client, generation: int, *members: Member) -> None:
    """What a run writes when a generation begins."""
    kv.put(RUN.round, GenerationRecord(generation, members, time=1.0).encode())
    kv.put(RUN.state, State(generation, "running", min_nodes=2).encode())


@pytest.mark.long
def test_two_ranks_meet_and_leave_nothing_behind(cluster: Cluster, kv: raftkv.Client) -> None:
    assert sum(step.verb == "PUT" for step in trace()) == 24
    for first in range(2):  # the scopes can be used again at once
        ends = cluster.endpoints
        asked = replay([[ends[first]], [ends[first + 1]]])
        assert (asked["PUT"], asked["DELETE"]) == (24, 12)
        assert asked["GET"] >= 20
        assert left(kv) == []


@pytest.mark.long
def test_two_ranks_meet_while_a_member_dies(cluster: Cluster, kv: raftkv.Client) -> None:
    ends = cluster.endpoints
    early = [step for step in trace() if step.rank == 0][:2]
    worker = Worker(ends)
    for step in early:
        worker.take(step)
    cluster.members[0].kill()
    for step in early:
        assert Worker(ends[1:]).ask("GET", step.path)[0] == 200, "what a dead member took is there"
    with ThreadPoolExecutor(1) as pool:
        both = pool.submit(replay, [ends, ends[1:]])
        cluster.members[0].restart()
        cluster.members[1].kill()
        assert both.result()["PUT"] == 24
    cluster.members[1].restart()
    assert left(kv) == []


@pytest.mark.long
def test_values_are_bytes_and_empty_ones_exist(cluster: Cluster, kv: raftkv.Client) -> None:
    first, second, third = cluster.endpoints
    assert say(first, "GET", "/global/0") == (404, b"")
    assert say(first, "PUT", "/global/0", b"") == (200, b"")
    assert say(second, "GET", "/global/0") == (200, b"")
    assert say(second, "PUT", "/global/0", bytes(range(256))) == (200, b"")
    assert say(third, "GET", "/global/0") == (200, bytes(range(256)))
    assert say(third, "PUT", "/worker_addresses/host-a:0", b"gASV") == (200, b"")
    assert left(kv) == ["000000000000/key/global/0", "000000000000/key/worker_addresses/host-a:0"]


def test_a_scope_of_workers_goes_when_all_have_finished(cluster: Cluster, kv: raftkv.Client) -> None:
    first, second, third = cluster.endpoints
    for rank in (0, 1):
        say(first, "PUT", f"/global/rank_{rank}", b"host")
    say(first, "PUT", "/local_host-a/0", b"")
    for _ in range(2):  # a worker that got no answer says it again
        assert say(second, "DELETE", "/global/0") == (200, b"")
    assert say(third, "GET", "/global/rank_0") == (200, b"host"), "rank 1 may need it yet"
    say(second, "PUT", "/global/rank_0", b"anew")
    assert say(second, "DELETE", "/global/1") == (200, b"")
    assert say(third, "GET", "/global/rank_1") == (200, b"host"), "rank 0 has begun again"
    assert say(third, "DELETE", "/global/0") == (200, b"")
    assert say(first, "GET", "/global/rank_0") == (404, b"")
    assert left(kv) == ["000000000000/key/local_host-a/0"]


def test_rate_limits_count_for_workers_too(cluster: Cluster, kv: raftkv.Client) -> None:
    """While there was a limit, a write of a worker failed, and reads were free."""
    limit = raftkv.aio.RateLimit("prefix", ROOT.encode(), bytes_per_s=100)
    kv.set_limit(limit)
    try:
        sent = [("GET", None), ("PUT", bytes(200_000)), ("GET", None), ("DELETE", None)]
        answers = [ask(cluster.endpoints[0], method, "/global/rank_0", body) for method, body in sent]
    finally:
        kv.set_limit(replace(limit, bytes_per_s=0))
    assert answers[:2] == [(404, b""), (200, b"")]
    assert [status for status, _ in answers[2:]] == [503, 503]
    assert all(b"too many requests" in body for _, body in answers[2:])


def test_other_scopes_are_tables(cluster: Cluster, kv: raftkv.Client) -> None:
    first, second, _ = cluster.endpoints
    for key in ("0", "1"):
        say(first, "PUT", f"/runfunc_result/{key}", b"x")
    assert say(second, "DELETE", "/runfunc_result/0") == (200, b"")
    assert say(second, "DELETE", "/runfunc_result/7") == (200, b"")
    assert left(kv) == ["000000000000/key/runfunc_result/1"]


def test_rank_and_size_come_from_the_run(cluster: Cluster, kv: raftkv.Client) -> None:
    two = (Member("a-1", "host-a", slots=2), Member("b-1", "host-b"))
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(say, end, "GET", "/rank_and_size/host-b:0") for end in cluster.endpoints[:2]]
        kv.put(RUN.state, State(0, "gathering").encode())
        begin(kv, 1, *two)
        assert [answer.result() for answer in waiting] == [(200, b"2,3,0,1,1,2")] * 2
        assert say(cluster.endpoints[2], "GET", "/rank_and_size/host-a:1") == (200, b"1,3,1,2,0,1")
        for stranger in ("host-a:2", "host-c:0"):
            assert say(cluster.endpoints[2], "GET", f"/rank_and_size/{stranger}") == (200, b"-1,-1,-1,-1,-1,-1")
        kv.put(RUN.state, State(1, "broken", "node lost").encode())
        late = pool.submit(say, cluster.endpoints[0], "GET", "/rank_and_size/host-a:0")
        begin(kv, 2, two[0])
        assert late.result() == (200, b"0,2,0,2,0,1")
    kv.put(RUN.state, State(2, "closed").encode())
    assert say(cluster.endpoints[1], "GET", "/rank_and_size/host-a:0") == (200, b"-1,-1,-1,-1,-1,-1")


def test_another_generation_is_another_table(cluster: Cluster, kv: raftkv.Client) -> None:
    first, second, _ = cluster.endpoints
    say(first, "PUT", "/global/rank_0", b"before all")
    begin(kv, 1, Member("a-1", "host-a"))
    assert say(second, "GET", "/global/rank_0") == (404, b"")
    say(first, "PUT", "/global/rank_0", b"one")
    begin(kv, 12, Member("a-2", "host-a"))
    assert say(second, "GET", "/global/rank_0") == (404, b"")
    say(first, "PUT", "/global/rank_1", b"twelve")
    assert left(kv) == ["000000000012/key/global/rank_1"]


def test_refusals_are_one_line(cluster: Cluster, kv: raftkv.Client) -> None:
    end = cluster.endpoints[0]
    refusals = {
        ask(end, "PUT", "/global/0", bytes(1024 * 1024 + 1)): (413, b"a value has more than 1048576 bytes\n"),
        ask(end, "PUT", f"/global/{'k' * 513}", b""): (414, b"a scope or a key has more than 512 bytes\n"),
        ask(end, "GET", "/rank_and_size/host"): (400, b"host is not <host>:<local rank>\n"),
        ask(end, "POST", "/global/0", b""): (405, b"Method Not Allowed\n"),
        ask(end, "PUT", "/global/0", b"", {"Origin": "http://a.example"}): (
            403,
            b"pages of this origin may change nothing here; see --cors and --host-whitelist\n",
        ),
        ask(end, "GET", "/global/0", None, {"Origin": "http://a.example"}): (
            403,
            b"pages in browsers may not use the rendezvous\n",
        ),
    }
    assert all(got == expected for got, expected in refusals.items())
    assert ask(end, "PUT", "/global/0", b"", {"Host": "evil.example"})[0] == 421
    kv.put(RUN.round, b"damage")
    status, text = ask(end, "GET", "/global/0")
    assert (status, text) == (
        500,
        b"/global/0: a record of the run is damaged: not a round record: Expecting value: line 1 column 1 (char 0)\n",
    )
    kv.delete(RUN.round)
    assert left(kv) == []


@pytest.mark.long
def test_a_member_alone_answers_nothing(cluster: Cluster, kv: raftkv.Client) -> None:
    """What it knows may be old: Horovod must ask again."""
    assert say(cluster.endpoints[0], "PUT", "/global/0", b"old") == (200, b"")
    for member in cluster.members[1:]:
        member.kill()
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(ask, cluster.endpoints[0], verb, "/global/0", b"") for verb in ("GET", "PUT", "DELETE")]
        answers = [one.result() for one in asked]
    assert [status for status, _ in answers] == [503] * 3
    assert all(text.startswith(b"/global/0: etcdserver: ") and text.count(b"\n") == 1 for _, text in answers), answers
    for member in cluster.members[1:]:
        member.start()
    for member in cluster.members[1:]:
        member.wait_ready()


def test_other_paths_are_as_they_were(cluster: Cluster, kv: raftkv.Client) -> None:
    end = cluster.endpoints[0]
    assert say(end, "GET", "/health") == (200, b'{"health":"true","reason":""}')
    assert [ask(end, "GET", path)[0] for path in ("/version", "/metrics", "/", "/a", "/a/b/c", "/v3/kv")] == [
        *(200, 200),
        *(404, 404, 404, 404),
    ]
    assert ask(end, "PUT", "/v3/kv", b"")[0] == 404
