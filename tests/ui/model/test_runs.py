"""What the dashboard shows of runs is what `raftkvctl run` prints: the same changes, read by both."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftkv.checkpoint.keys import RANDOM_DIGITS, AttemptId, RegistryKeys
from raftkv.checkpoint.records import Checkpoint, Deleting
from raftkv.cli import run_view as view
from raftkv.cli.run_view import Denied, Facts, Queue, waiting
from raftkv.cli.table import Rows
from raftkv.training.history import (
    CommitHistory,
    GivenUp,
    RunHistory,
    RunSummary,
    Stamp,
    count_nodes,
    fold,
    read_change,
    with_commits,
)
from raftkv.training.records import CAUSES, PHASES, ROOT, Fault, GenerationRecord, Member, Node, State
from tests.training.scripted_run import GENERATION_2_RUNS, KEYS, SCRIPT, A, B, Script, encoded
from tests.ui.model.runner import Model, event, kv, plain

FIRST_REVISION = 2


def history_of(script: Script) -> RunHistory:
    changes = [
        read_change(KEYS, (KEYS.base + name).encode(), encoded(content), revision)
        for revision, (name, content) in enumerate(script, FIRST_REVISION)
    ]
    folded = fold(KEYS, [change for change in changes if change is not None])
    return folded.history(since_revision=FIRST_REVISION, complete=True)


def events_of(script: Script) -> list[dict[str, Any]]:
    return [
        event(KEYS.base + name, encoded(content), revision)
        for revision, (name, content) in enumerate(script, FIRST_REVISION)
    ]


def table(rows: Rows) -> dict[str, Any]:
    return {"header": list(rows.header), "rows": [list(row) for row in rows.rows]}


def check_alike(model: Model, script: Script) -> None:
    history = history_of(script)
    found = model.run("history", run=KEYS.run_id, events=events_of(script), since=FIRST_REVISION)
    expected = plain(asdict(history))
    expected["revision"] = found["history"]["revision"]  # that of the last change that says something
    assert found["history"] == expected
    assert found["roots"] == plain([one.root_fault for one in history.generations])
    assert found["generations"] == table(view._generations_table(history))
    assert found["nodes"] == table(view._nodes_table(history))
    facts = Facts(history, tuple(waiting(history, [], None)))
    described = found["described"]
    assert described["headline"] == view.headline(facts)
    assert [(one["id"], one["why"]) for one in described["waiting"]] == [(e.node.id, e.why) for e in facts.waiting]
    assert [(one["rank"], one["id"]) for one in described["members"]] == [(rank, m.id) for rank, m in facts.members]
    assert described["faults"] == plain(facts.faults)


@pytest.mark.parametrize("steps", range(len(SCRIPT) + 1))
def test_every_step_of_a_run_with_a_fault_reads_as_in_the_command_line(model: Model, steps: int) -> None:
    check_alike(model, SCRIPT[:steps])


IDS = st.sampled_from(["a-1", "b-1", "c-1", "d-1"])
TIMES = st.integers(400, 480).map(lambda quarter: quarter / 4)
GENERATIONS = st.integers(0, 3)
MEMBERS = st.builds(Member, IDS, st.sampled_from("ab"), slots=st.integers(1, 3))
LIMITS = {"min_nodes": st.sampled_from([2, 2, 2, 1]), "max_nodes": st.sampled_from([3, 3, 3, 2])}
NODES = st.builds(Node, IDS, st.sampled_from("ab"), want=st.integers(1, 3), **LIMITS, time=TIMES)
STATES = st.builds(
    State, GENERATIONS, st.sampled_from(PHASES), st.sampled_from(["", "lost 1 of 2: a"]),
    st.sampled_from(["", "scale up", *CAUSES]), st.one_of(st.just(""), IDS), st.integers(0, 3), **LIMITS, time=TIMES,
)  # fmt: skip
FAULTS = st.builds(
    Fault, GENERATIONS, IDS, st.sampled_from(["", "a"]), st.integers(-1, 2), st.sampled_from(CAUSES),
    st.sampled_from([1, 128 + 15]), st.sampled_from(["", "SIGKILL", "SIGABRT", "SIGTERM"]),
    st.sampled_from(["", "Broken pipe", "disk full"]), TIMES,
)  # fmt: skip
CHANGES = st.one_of(
    NODES.map(lambda node: (f"node/{node.id}", node)),
    IDS.map(lambda name: (f"node/{name}", None)),
    st.tuples(st.just("arbiter"), st.one_of(st.none(), IDS)),
    st.builds(
        lambda *fields: ("round", GenerationRecord(*fields)),
        GENERATIONS,
        st.lists(MEMBERS, max_size=3).map(tuple),
        TIMES,
    ),
    STATES.map(lambda state: ("state", state)),
    st.tuples(st.just("state"), st.one_of(st.none(), st.just("no record"))),
    FAULTS.map(lambda fault: (f"fault/{fault.generation}/{fault.key}", fault)),
    st.tuples(
        st.sampled_from(["boot/1", "deny/a", "fault/1/x", "round/head", "store/1/x"]), st.sampled_from(["x", None])
    ),
)


@pytest.mark.long
def test_any_run_reads_as_in_the_command_line(model: Model) -> None:
    @settings(max_examples=300)
    @given(st.sampled_from([0, 6, GENERATION_2_RUNS]), st.lists(CHANGES, max_size=20), st.integers(0, 3))
    def check(begun: int, changes: Script, told_again: int) -> None:
        check_alike(model, [*SCRIPT[:begun], *changes, *changes[-told_again:]])

    check()


ABORTED = Fault(1, A.id, "a", rank=0, cause="signal", signal="SIGABRT", message="Broken pipe", time=109.0)
RAISED = Fault(1, B.id, "b", rank=1, cause="exit", exit_code=1, message="disk full", time=109.1)
D = Node("d-1", "d", min_nodes=2, max_nodes=4)


@pytest.mark.parametrize(
    "more",
    [
        [("fault/1/000000", ABORTED), ("fault/1/000001", RAISED)],
        [("state", State(1, "broken", min_nodes=2, max_nodes=4))],
        [("state", State(1, "closed", "done", min_nodes=2, max_nodes=4)), ("round", GenerationRecord(1, (), 101.0))],
        [("state", State(1, "broken", min_nodes=2, max_nodes=4)), ("node/a-1", replace(A, want=2))],
        [("state", State(1, "running", min_nodes=2, max_nodes=2)), ("node/d-1", replace(D, max_nodes=2))],
        [("state", State(1, "running", min_nodes=2, max_nodes=4)), ("node/d-1", D)],
    ],
)
def test_rare_events_read_as_in_the_command_line(model: Model, more: Script) -> None:
    check_alike(model, [*SCRIPT[:6], *more])


def test_commits_and_what_a_fault_cost_read_as_in_the_command_line(model: Model) -> None:
    keys, history = RegistryKeys(KEYS.run_id), history_of(SCRIPT)
    commits, past, revision = [], [], 100
    for step, began, time in ((100, 7, 103.0), (200, 8, 106.5), (300, 17, 112.0)):
        one = Checkpoint(
            KEYS.run_id, step, 1, began * RANDOM_DIGITS + 5, "dcp", 2, "memory://x", "m", "r", 2, 10,
            holder="a-1", time=time, duration_s=0.5, metrics={"loss": 0.5},
        )  # fmt: skip
        key, revision = keys.record("dcp", step), revision + 1
        past += [event(key, one.encode(), revision), event(key, one.encode(), revision + 50, create=revision)]
        saved, committed = Stamp(time - 0.5, "a-1", began), Stamp(time, "a-1", revision)
        commits.append(CommitHistory(step, "dcp", 10, "a-1", saved, committed))
    attempt = AttemptId(250, 1, 9 * RANDOM_DIGITS)
    gone = event(keys.deleting("dcp", attempt), Deleting("memory://x").encode(), 150)
    expected = with_commits(history, commits, [GivenUp(250, 9)])
    found = model.run("history", run=KEYS.run_id, events=events_of(SCRIPT), commits=past, deletions=[gone])
    assert found["generations"] == table(view._generations_table(expected))
    assert "2: steps 100 to 200" in found["generations"]["rows"][0]
    assert found["history"]["generations"] == plain(asdict(expected))["generations"]


def test_runs_are_listed_as_in_the_command_line(model: Model) -> None:
    states = [State(1, PHASES[1], time=100.0), State(2, PHASES[3], "done", time=90.0)]
    keys = {
        "jobs/a/state": states[0].encode(), "jobs/a/node/h-1": B.encode(), "jobs/a/node/i-1": B.encode(),
        "jobs/a/store/1/x/state": b"1", "jobs/b/node/x-1": B.encode(), "z/state": states[1].encode(),
        "odd/state": b"no record", "w/sync/1/node/x": b"", "w/round": b"{}",
        f"{'é' * 100}/state": b"", f"{'é' * 101}/state": b"", f"jobs/a/{'a/' * 2_000}state": b"",
    }  # fmt: skip
    nodes = count_nodes(list(keys))
    summaries = [RunSummary(run, {"jobs/a": states[0], "z": states[1]}.get(run), count) for run, count in nodes.items()]
    found = model.run("runs", kvs=[kv(ROOT + name, value) for name, value in keys.items()])
    assert found == table(view.runs_table(summaries))["rows"]
    assert [row[:2] for row in found][:2] == [["jobs/a", "running"], ["jobs/b", "gathering"]]


def test_a_node_waits_for_the_reason_that_the_command_line_gives(model: Model) -> None:
    script = [*SCRIPT[:GENERATION_2_RUNS], ("state", State(2, "broken", min_nodes=2, max_nodes=4)), ("node/b-1", B)]
    history = history_of(script)
    for denied, queue in (([Denied("b", "it burns", 30)], None), ([], Queue("gpu", True, "number 2 in line"))):
        facts = waiting(history, denied, queue)
        beside = {"denied": plain(denied), "queue": plain(queue)}
        found = model.run("history", run=KEYS.run_id, events=events_of(script), beside=beside)["described"]
        assert [(one["id"], one["why"]) for one in found["waiting"]] == [(one.node.id, one.why) for one in facts]


def test_lanes_have_bars_faults_and_commits_within_the_drawing(model: Model) -> None:
    found = model.run("drawing", run=KEYS.run_id, events=events_of(SCRIPT), now=130.0)
    lanes = {lane["host"]: lane for lane in found["lanes"]}
    assert [[bar["generation"] for bar in lanes[host]["bars"]] for host in "abc"] == [[1, 2], [1], [2]]
    assert [fault["isRoot"] for fault in lanes["b"]["faults"]] == [True]
    assert lanes["b"]["faults"][0]["text"] == "rank 1 on b was killed by SIGKILL"
    assert [lane["isThere"] for lane in lanes.values()] == [lane["host"] == "c" for lane in lanes.values()]
    places = [bar[end] for lane in found["lanes"] for bar in lane["bars"] for end in ("from", "to")]
    assert 0 <= min(places) < max(places) <= 1
    assert [one["isBroken"] for one in found["generations"]] == [True, True]


def test_of_many_nodes_those_with_faults_are_drawn(model: Model) -> None:
    many = tuple(Member(f"n{number}", f"h{number}") for number in range(500))
    fault = Fault(1, "n400", "h400", rank=400, cause="signal", signal="SIGKILL", time=5.0)
    script: Script = [("round", GenerationRecord(1, many, 1.0)), ("fault/1/000400", fault)]
    found = model.run("drawing", run=KEYS.run_id, events=events_of(script), now=10.0)
    assert found["hidden"] == 500 - len(found["lanes"])
    assert any(lane["id"] == "n400" for lane in found["lanes"])
