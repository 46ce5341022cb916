"""The history of a run: folded from changes, and read from a real cluster, whole and compacted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

import raftkv.aio
from raftkv.training.errors import UnknownRun
from raftkv.training.history import (
    Change,
    Duration,
    Stamp,
    count_nodes,
    fold,
    follow,
    interval,
    list_runs,
    read_change,
    read_history,
    read_past,
)
from raftkv.training.records import CLOSED, RUN_ID_MAX, Fault, GenerationRecord, State
from tests.long import long_except
from tests.procs import ETCD_FAST, Cluster
from tests.training.scripted_run import COLLATERAL, KEYS, KILLED, SCRIPT, A, C, Script, encoded, members

TIMEOUT_S = 90.0


def changes() -> list[Change]:
    found = [
        read_change(KEYS, (KEYS.base + name).encode(), encoded(content), revision)
        for revision, (name, content) in enumerate(SCRIPT, 2)
    ]
    return [change for change in found if change is not None]


def test_generations_have_members_ends_and_causes() -> None:
    first, second = fold(KEYS, changes()).history(since_revision=2, complete=True).generations
    assert (first.generation, [member.host for member in first.members]) == (1, ["a", "b"])
    assert (first.cause, first.node, first.reason) == ("signal", "b-1", "rank 1 on b was killed by SIGKILL")
    assert (first.lasted, first.recovery) == (Duration(8.25), Duration(0.5))
    assert (second.generation, second.rank_of("c-1"), second.rank_of("b-1")) == (2, 1, None)
    assert (second.recovery, second.cause) == (None, "heartbeat lost")


def test_the_fault_that_the_arbiter_names_is_the_root() -> None:
    first, second = fold(KEYS, changes()).history(since_revision=2, complete=True).generations
    assert first.faults == (COLLATERAL, KILLED)
    assert first.root_fault == KILLED
    assert second.root_fault is None


def test_a_duration_by_two_clocks_says_so() -> None:
    second = fold(KEYS, changes()).history(since_revision=2, complete=True).generations[1]
    assert second.lasted == Duration(10.25, approximate=True)
    assert str(second.lasted) == "~10.25 s"
    assert Duration.between(Stamp(9.0, "a", 1), Stamp(8.0, "a", 2)) == Duration(0.0, approximate=True)


def test_shortened_record_keeps_members_in_history() -> None:
    short = Change(50, "round", "", GenerationRecord(2, (), 109.75))
    history = fold(KEYS, [*changes(), short]).history(since_revision=2, complete=True)
    assert [[member.host for member in one.members] for one in history.generations] == [["a", "b"], ["a", "c"]]
    assert history.round is not None
    assert len(history.round.members) == 2


def test_a_closed_run_that_begins_anew_has_not_recovered() -> None:
    closed = State(2, CLOSED, "succeeded", node=C.id, time=130.0)
    anew = [Change(50, "state", "", closed), Change(60, "round", "", GenerationRecord(3, members(A, C), 999.0))]
    begun = [change for change in changes() if change.kind != "state" or change.revision < 18]
    history = fold(KEYS, [*begun, *anew]).history(since_revision=2, complete=True)
    second, third = history.generations[1:]
    assert (second.closed, second.reason, second.ended) == (True, "succeeded", Stamp(130.0, C.id, 50))
    assert (second.recovery, third.generation, third.ended) == (None, 3, None)


def test_nodes_come_and_go() -> None:
    history = fold(KEYS, changes()).history(since_revision=2, complete=True)
    assert [(node.id, node.left_revision, node.cause) for node in history.nodes] == [
        ("a-1", 16, "heartbeat lost"),
        ("b-1", 12, "signal"),
        ("c-1", 0, ""),
    ]
    assert [node.id for node in history.present] == ["c-1"]
    assert history.arbiter == "c-1"


def test_foreign_keys_are_left_out() -> None:
    base = KEYS.base.encode()
    assert read_change(KEYS, base + b"state", b"not json", 9) is None
    assert read_change(KEYS, base + b"state", b'{"epoch":1,"phase":"odd"}', 9) is None
    assert read_change(KEYS, base + b"store/1/x", b"1", 9) is None
    assert read_change(KEYS, base + b"round/head", GenerationRecord(3).encode(), 9) is None
    assert read_change(KEYS, base + b"round/head", None, 9) is None
    assert read_change(KEYS, base + b"arbiter", b"\xff", 9) is None


def test_keys_of_users_are_no_runs() -> None:
    names = [
        "jobs/a/node/h-1", "jobs/a/node/h-2", "jobs/a/round", "jobs/a/state", "jobs/a/store/3/x/state",
        "jobs/a/sync/3/node/h-1", "b/state", "new/node/h-3", "b/boot/1",
    ]  # fmt: skip
    assert count_nodes(names) == {"b": 0, "jobs/a": 2, "new": 1}


def test_a_name_that_no_run_can_have_is_not_looked_at() -> None:
    """A user of one run wrote a key of 200,000 parts below it: listing all runs then took minutes."""
    deep = "b/" + "a/" * 2_000
    assert count_nodes([f"{deep}state", f"{deep}node/h-1", "b/state", f"{'c' * RUN_ID_MAX}/state"]) == {
        "b": 0,
        "c" * RUN_ID_MAX: 0,
    }


def test_a_node_that_stays_is_kept_once_for_all_generations() -> None:
    folded = fold(KEYS, changes())
    first, second = (generation.members for generation in folded.generations)
    assert first[0] is second[0]
    assert [member.id for member in second] == [A.id, C.id]


def test_faults_are_not_compared_with_each_other() -> None:
    """20,000 that a user of the run wrote took minutes, in the exporter of all runs too."""
    compared = 0

    class Told(Fault):
        __hash__ = Fault.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return Fault.__eq__(self, other)

    told = [Change(30, "fault", f"2/{rank:06d}", Told(2, C.id, rank=rank)) for rank in range(300)] * 2
    history = fold(KEYS, [*changes(), *told]).history(since_revision=2, complete=True)
    assert len(history.generations[1].faults) == 300
    assert compared <= 600


def test_each_name_is_looked_at_once_however_many_runs_there_are() -> None:
    looked = 0

    class Name(str):
        def startswith(self, *args: Any) -> bool:
            nonlocal looked
            looked += 1
            return super().startswith(*args)

    names = [Name(f"job-{number}/{part}") for number in range(50) for part in ("node/a", "node/b", "round", "state")]
    assert count_nodes(names) == {f"job-{number}": 2 for number in range(50)}
    assert looked <= len(names)


@pytest.fixture(params=long_except(["raftkv", "etcd"], ["raftkv"]))
def endpoints(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """The history of a run is read from raftkv, and from etcd 3.5.1."""
    if request.param == "raftkv":
        yield request.getfixturevalue("raftkv_cluster").endpoints
    else:
        with Cluster(ETCD_FAST) as cluster:
            yield cluster.endpoints


def on_cluster(endpoints: list[str], use: Callable[[raftkv.aio.Client], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(TIMEOUT_S), raftkv.aio.connect(endpoints, timeout_s=TIMEOUT_S) as kv:
            await use(kv)

    asyncio.run(run())


async def write(kv: raftkv.aio.Client, script: Script) -> list[int]:
    revisions = []
    for name, content in script:
        value = encoded(content)
        lease = await kv.lease(60).grant() if name.startswith("node/") else None
        done = await (kv.delete(KEYS.base + name) if value is None else kv.put(KEYS.base + name, value, lease=lease))
        revisions.append(done.revision)
    return revisions


def test_history_is_read_whole_listed_and_compacted(endpoints) -> None:
    async def use(kv: raftkv.aio.Client) -> None:
        await kv.put("elsewhere", b"1")
        revisions = await write(kv, SCRIPT)
        await kv.put("elsewhere", b"2")
        history = await read_history(kv, "jobs/a")
        assert (history.complete, history.since_revision) == (True, revisions[2])
        assert [generation.generation for generation in history.generations] == [1, 2]
        assert history.generations[0].recovery == Duration(0.5)
        assert history.generations[0].root_fault == KILLED
        assert [node.id for node in history.nodes] == ["a-1", "b-1", "c-1"]
        assert history.nodes[0].joined.revision == revisions[0]
        assert history.state == SCRIPT[16][1]
        assert history.revision == revisions[-1] + 1

        runs = await list_runs(kv)
        assert [(run.run_id, run.nodes, run.state) for run in runs] == [("jobs/a", 1, history.state)]

        await kv.compact(revisions[9])  # the first generation has just broken
        later = await read_history(kv, "jobs/a")
        assert (later.complete, later.since_revision) == (False, revisions[9] + 1)
        assert [(generation.generation, generation.cause) for generation in later.generations] == [
            (1, "signal"),
            (2, "heartbeat lost"),
        ]
        assert later.generations[0].recovery == Duration(0.5)
        assert later.generations[0].faults == (COLLATERAL, KILLED)

        await kv.compact(revisions[-1])
        last = await read_history(kv, "jobs/a")
        assert [generation.generation for generation in last.generations] == [2]
        assert (last.state, last.complete) == (history.state, False)
        with pytest.raises(UnknownRun, match="there is no run 'jobs/b'"):
            await read_history(kv, "jobs/b")
        await kv.put("/raftkv/train/jobs/best/state", b"{}")
        with pytest.raises(UnknownRun, match="there is no run 'jobs'"):  # one lies below it
            await read_history(kv, "jobs")

    on_cluster(endpoints, use)


def test_history_keeps_nothing_of_runs_below(raftkv_cluster) -> None:
    async def use(kv: raftkv.aio.Client) -> None:
        for name in ("b/arbiter", "b/node/n", "b/state", "round/head", "store/1/a"):
            await kv.put(f"{KEYS.base}{name}", b"of another")
        await write(kv, SCRIPT)
        past = await read_past(kv, interval(KEYS), 1)
        names = {name for name, _ in SCRIPT}
        assert {event.key.decode().removeprefix(KEYS.base) for event in past.events} <= names
        assert len(past.items) > 3

    on_cluster(raftkv_cluster.endpoints, use)


def test_following_begins_with_the_present_and_goes_on(raftkv_cluster) -> None:
    async def use(kv: raftkv.aio.Client) -> None:
        await write(kv, SCRIPT[:6])
        following = follow(kv, "jobs/a")
        change, folded = await anext(following)
        assert change is None
        assert folded.state == SCRIPT[5][1]
        await write(kv, SCRIPT[6:])
        seen = []
        while len(seen) < len(SCRIPT) - 6:
            change, folded = await anext(following)
            assert change is not None
            seen.append(change.kind)
        await following.aclose()
        assert seen == [name.partition("/")[0] for name, _ in SCRIPT[6:]]
        whole = await read_history(kv, "jobs/a")
        assert folded.history(since_revision=whole.since_revision, complete=True) == whole

    on_cluster(raftkv_cluster.endpoints, use)
