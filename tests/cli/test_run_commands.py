"""``raftkvctl run list|show|timeline|watch|delete`` on runs whose records the test writes itself."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import time

import pytest

import raftkv
from raftkv.checkpoint.keys import RANDOM_DIGITS, AttemptId, RegistryKeys
from raftkv.checkpoint.records import Checkpoint
from raftkv.cli import run_view
from raftkv.cli.run_view import Denied, Line, Narrator, Queue, members_text, ranks_text, waiting
from raftkv.cli.table import clock
from raftkv.client.values import KeyValue
from raftkv.training.history import fold, read_change
from raftkv.training.records import (
    CLOSED,
    CLUSTER_ROOT,
    GATHERING,
    RUNNING,
    GenerationRecord,
    Member,
    Node,
    RunKeys,
    State,
)
from raftkv.training.scheduling.admission import Claim, Ledger, Need
from tests.cli.programs import Running, raftkvctl
from tests.cli.runner import Ran, run_ctl
from tests.training.scripted_run import GENERATION_2_RUNS, KEYS, SCRIPT, B, C, Script, encoded, members, state

TIMEOUT_S = 90.0


def write(kv: raftkv.Client, script: Script, keys: RunKeys = KEYS) -> None:
    for name, content in script:
        value = encoded(content)
        if value is None:
            kv.delete(keys.base + name)
        else:
            kv.put(keys.base + name, value, lease=kv.lease(60).grant() if name.startswith("node/") else None)


def ctl(cluster: raftkv.LocalCluster, *words: str) -> Ran:
    return run_ctl(["--endpoints", cluster.endpoints[0], "run", *words])


def text_of(ran: Ran) -> str:
    assert (ran.code, ran.errors) == (0, "")
    return ran.output.decode()


def plain_of(ran: Ran) -> dict:
    return json.loads(text_of(ran))


# ---- list and show


def test_runs_are_listed(raftkv_cluster, raftkv_client) -> None:
    assert text_of(ctl(raftkv_cluster, "list")) == "run  phase  generation  nodes  limits  since  reason\n"
    write(raftkv_client, SCRIPT)
    write(raftkv_client, [("node/x-1", B)], RunKeys("new"))
    lines = text_of(ctl(raftkv_cluster, "list")).splitlines()
    assert lines[1].split()[:5] == ["jobs/a", "broken", "2", "1", "2:4"]
    assert lines[1].endswith("lost 1 of 2: a")
    assert lines[2].split()[:4] == ["new", "gathering", "0", "1"]
    first, second = json.loads(text_of(ctl(raftkv_cluster, "list", "--json")))
    assert (first["run"], first["nodes"], first["phase"], first["epoch"]) == ("jobs/a", 1, "broken", 2)
    assert (second["run"], second["nodes"], second["phase"]) == ("new", 1, "gathering")


def test_a_running_run_is_shown(raftkv_cluster, raftkv_client) -> None:
    write(raftkv_client, [*SCRIPT[:GENERATION_2_RUNS], ("boot/2", "10.0.0.0:29511")])
    text = text_of(ctl(raftkv_cluster, "show", "jobs/a"))
    assert text.startswith("run jobs/a: running, generation 2: 2 nodes, 2 ranks; 2 nodes present, 2 to 4 wanted\n")
    assert "re-formed in 0.50 s after: rank 1 on b was killed by SIGKILL\n" in text
    assert "store of the workers: 10.0.0.0:29511\narbiter a-1\n" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["0", "a-1", "a", "10.0.0.0", "1"] in rows
    assert ["1", "c-1", "c", "10.0.0.2", "1"] in rows
    assert "rank 1 on b was killed by SIGKILL" in text.splitlines()[-1]
    found = plain_of(ctl(raftkv_cluster, "show", "jobs/a", "-w", "json"))
    assert (found["phase"], found["epoch"], found["min_nodes"], found["max_nodes"]) == ("running", 2, 2, 4)
    assert [(one["rank"], one["host"]) for one in found["members"]] == [(0, "a"), (1, "c")]
    assert (found["waiting"], found["meeting"], len(found["faults"])) == ([], "10.0.0.0:29511", 2)


def test_denied_hosts_and_those_who_wait_are_shown(raftkv_cluster, raftkv_client) -> None:
    write(raftkv_client, SCRIPT[:GENERATION_2_RUNS])
    with raftkv_client.lease(100) as lease:
        raftkv_client.put(f"{KEYS.base}deny/b", b"it burns", lease=lease)
        raftkv_client.put(f"{KEYS.base}node/b-1", B.encode())
        found = plain_of(ctl(raftkv_cluster, "--json", "show", "jobs/a"))
        assert found["denied"][0]["host"] == "b"
        assert 0 < found["denied"][0]["seconds_left"] <= 100
        assert [one["id"] for one in found["waiting"]] == ["b-1"]
        assert found["waiting"][0]["why"].startswith("denied for ")
        assert "it burns" in found["waiting"][0]["why"]


def test_a_dead_run_says_so(raftkv_cluster, raftkv_client) -> None:
    write(raftkv_client, [*SCRIPT[:6], ("node/a-1", None), ("node/b-1", None)])
    assert "running, no nodes" in text_of(ctl(raftkv_cluster, "list"))
    assert "; no node is left\n" in text_of(ctl(raftkv_cluster, "show", "jobs/a"))
    write(raftkv_client, [("state", state(1, CLOSED, 110.0, "finished"))])
    assert text_of(ctl(raftkv_cluster, "show", "jobs/a")).startswith("run jobs/a: closed after generation 1\n")


NODE = Node("d-1", "d", min_nodes=2, max_nodes=2, want=1, time=1.0)
FULL = GenerationRecord(3, (Member("a-1", "a"), Member("b-1", "b")))


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ({"phase": CLOSED}, "the run is closed"),
        ({"phase": RUNNING, "round": FULL}, "standby: all 2 places are taken"),
        ({"phase": RUNNING, "round": GenerationRecord(3, FULL.members[:1])}, "about to join"),
        ({"phase": GATHERING}, "waiting for the minimum: 1 of 2 nodes are present"),
        ({"phase": "broken", "round": GenerationRecord(3, (NODE.member,))}, "stopping its workers of generation 3"),
        ({"phase": GATHERING, "min": 1, "max": 8}, "was started with 2:2 nodes, the run has 1:8"),
        ({"phase": GATHERING, "denied": "d"}, "denied for 30 s more: it burns"),
        ({"phase": GATHERING, "others": 1}, "waiting for more nodes to come"),
        (
            {"phase": GATHERING, "others": 1, "queue": Queue("gpu", True, "number 2 in line")},
            "waiting for admission to cluster gpu: number 2 in line",
        ),
    ],
)
def test_every_node_that_waits_says_why(what: dict, reason: str) -> None:
    limits = {"min_nodes": what.get("min", 2), "max_nodes": what.get("max", 2)}
    folded = fold(KEYS, [])
    folded.state = State(3, what["phase"], **limits)
    folded.round = what.get("round")
    others = [Node(f"o-{number}", "o", min_nodes=2, max_nodes=2) for number in range(what.get("others", 0))]
    folded.present = {node.id: node for node in [NODE, *others]}
    denied = [Denied(what["denied"], "it burns", 30)] if "denied" in what else []
    found = waiting(folded.history(since_revision=1, complete=True), denied, what.get("queue"))
    assert found[0].why == reason


CLAIMS = (
    Claim("first", 1, nodes=(Need("n", "h", 8),), granted=("n",)),
    Claim(KEYS.run_id, 2, min_nodes=2, max_nodes=4, nodes=(Need("a-1", "h", 8), Need("b-1", "g", 8))),
)


def test_the_line_for_a_cluster_is_shown(raftkv_cluster, raftkv_client) -> None:
    none = "No cluster shares its slots among runs. A run joins one with the setting cluster=NAME.\n"
    assert text_of(ctl(raftkv_cluster, "queue")) == none
    assert text_of(ctl(raftkv_cluster, "queue", "--json")) == "[]\n"
    raftkv_client.put(f"{CLUSTER_ROOT}other/ledger", b"not a ledger")
    raftkv_client.put(f"{CLUSTER_ROOT}gpu/ledger", Ledger(CLAIMS).encode())
    raftkv_client.put(f"{RunKeys('first').nodes}n", b"{}")
    write(raftkv_client, SCRIPT[:4])
    found = plain_of(ctl(raftkv_cluster, "show", "jobs/a", "--json"))
    assert (found["queue"]["cluster"], found["queue"]["waits"]) == ("gpu", True)
    why = f"waiting for admission to cluster gpu: {found['queue']['reason']}"
    assert found["queue"]["reason"]
    assert [one["why"] for one in found["waiting"]] == [why, why]
    lines = text_of(ctl(raftkv_cluster, "queue", "gpu")).splitlines()
    assert lines[0] == "cluster gpu: 2 hosts, 1 run admitted, 1 waiting"
    assert any(line.split()[:5] == ["h", "8", "0", "first", "8"] for line in lines)
    assert any(line.split()[:4] == ["1", "jobs/a", "2:4", "2"] for line in lines)
    view = json.loads(text_of(ctl(raftkv_cluster, "queue", "gpu", "--json")))[0]
    assert (view["cluster"], view["queue"][0]["run"]) == ("gpu", "jobs/a")
    damaged = ctl(raftkv_cluster, "queue", "other")
    assert (damaged.code, damaged.errors.count("\n")) == (1, 1)
    every = ctl(raftkv_cluster, "queue")  # the ledger of one cluster hides no other
    assert (every.code, every.output.decode().splitlines()) == (1, lines)
    assert every.errors == damaged.errors
    assert every.errors.startswith("Error: cluster 'other': not a ledger record: ")


# ---- timeline


def test_the_timeline_names_causes_and_seconds(raftkv_cluster, raftkv_client) -> None:
    write(raftkv_client, SCRIPT)
    text = text_of(ctl(raftkv_cluster, "timeline", "jobs/a"))
    began = clock(101.0), clock(109.75)
    lines = text.splitlines()
    assert lines[0] == "run jobs/a: 2 generations, 3 nodes, 2 faults"
    rows = [line.split("  ") for line in lines]
    first, second = ([cell.strip() for cell in row if cell.strip()] for row in rows[3:5])
    killed = "rank 1 on b was killed by SIGKILL"
    assert first == ["1", began[0], "8.25 s", "a (rank 0), b (rank 1)", killed, "0.50 s"]
    assert second == ["2", began[1], "~10.25 s", "a (rank 0), c (rank 1)", "lost 1 of 2: a"]
    assert [line.split()[0] for line in lines[7:]] == ["a-1", "b-1", "c-1"]
    assert [line.rsplit("  ", 1)[1] for line in lines[7:]] == ["gone: heartbeat lost", "gone: signal", "is there"]
    found = plain_of(ctl(raftkv_cluster, "timeline", "jobs/a", "--json"))
    assert found["epochs"][0]["root_fault"]["signal"] == "SIGKILL"
    assert found["epochs"][0]["recovery"] == {"seconds": 0.5, "approximate": False}


REGISTRY = RegistryKeys(KEYS.run_id)


def commit(kv: raftkv.Client, step: int, began: int, saved: float, committed: float) -> None:
    """Write the record of a checkpoint, as its coordinator would have at that time."""
    one = Checkpoint(
        KEYS.run_id, step, 1, began, "dcp", 2, "/c", "m", "r", 2, 64, holder="a", time=committed,
        duration_s=committed - saved,
    )  # fmt: skip
    kv.put(REGISTRY.record("dcp", step), one.encode())


def now(kv: raftkv.Client) -> int:
    """Return the number of an attempt that begins now."""
    return kv.range("x").revision * RANDOM_DIGITS + 7


def test_the_timeline_tells_commits_and_what_faults_cost(raftkv_cluster, raftkv_client) -> None:
    kv = raftkv_client
    write(kv, SCRIPT[:7])  # generation 1 runs
    commit(kv, 100, now(kv), saved=102.0, committed=102.5)
    commit(kv, 200, now(kv), saved=104.0, committed=104.5)
    taken_over = now(kv)
    write(kv, SCRIPT[7:GENERATION_2_RUNS])  # b's worker is killed at 109.25; generation 2 runs from 109.75 on
    commit(kv, 300, taken_over, saved=106.0, committed=110.0)
    kv.delete(REGISTRY.record("dcp", 100))  # by retention
    kv.put(REGISTRY.deleting("dcp", AttemptId(100, 1, 10 * RANDOM_DIGITS)), b"{}")
    kv.put(REGISTRY.deleting("dcp", AttemptId(320, 2, now(kv))), b"{}")
    write(kv, SCRIPT[GENERATION_2_RUNS:])
    lines = text_of(ctl(raftkv_cluster, "timeline", "jobs/a")).splitlines()
    assert lines[0] == "run jobs/a: 2 generations, 3 nodes, 2 faults, 3 commits"
    assert lines[2].split()[4:6] == ["commits", "lost"]
    first, second = ([cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines[3:5])
    assert first[4:6] == ["3: steps 100 to 300", "~3.25 s since step 300, up to ~162 steps"]
    assert second[4] == "~10.25 s since step 300, at least 20"
    plain = plain_of(ctl(raftkv_cluster, "timeline", "jobs/a", "--json"))["epochs"]
    assert [one["step"] for one in plain[0]["commits"]] == [100, 200, 300]
    assert plain[0]["lost"] == {
        "kept_step": 300, "since": {"seconds": 3.25, "approximate": True}, "steps_at_least": 0, "steps_estimated": 162
    }  # fmt: skip
    assert (plain[1]["commits"], plain[1]["lost"]["steps_at_least"]) == ([], 20)


def test_commits_behind_a_compaction_are_known_if_they_are_there(raftkv_cluster, raftkv_client) -> None:
    kv = raftkv_client
    write(kv, SCRIPT[:7])
    commit(kv, 100, now(kv), saved=102.0, committed=102.5)
    kv.put(REGISTRY.record("dcp", 50), b"of somebody else")
    kv.compact(now(kv) // RANDOM_DIGITS)
    write(kv, SCRIPT[7:10])
    (one,) = plain_of(ctl(raftkv_cluster, "timeline", "jobs/a", "--json"))["epochs"]
    assert ([commit["step"] for commit in one["commits"]], one["lost"]["kept_step"]) == ([100], 100)


def test_a_compacted_history_says_so(raftkv_cluster, raftkv_client) -> None:
    write(raftkv_client, SCRIPT)
    revision = raftkv_client.range(KEYS.base, prefix=True).revision
    raftkv_client.compact(revision)
    text = text_of(ctl(raftkv_cluster, "timeline", "jobs/a"))
    assert f"\nthe history before revision {revision + 1} was compacted\n" in text
    assert text.startswith("run jobs/a: 1 generation, 1 node, 0 faults\n")


@pytest.mark.long
def test_on_a_terminal_there_are_frames_and_colour(raftkv_cluster, raftkv_client) -> None:
    write(raftkv_client, SCRIPT)
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "160"}
    environment.pop("NO_COLOR", None)
    command = raftkvctl(raftkv_cluster.endpoints[0], "run", "show", "jobs/a")
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment) as process:
        os.close(slave)
        shown = b""
        try:
            while chunk := os.read(master, 65536):
                shown += chunk
        except OSError:
            pass  # a terminal reports so that its other side is closed
        assert process.wait(TIMEOUT_S) == 0
    os.close(master)
    assert "│" in shown.decode()
    assert b"\x1b[1;31mrun jobs/a: broken" in shown


# ---- watch


@pytest.mark.long
def test_a_run_is_watched_live(raftkv_cluster, raftkv_client) -> None:
    write(raftkv_client, SCRIPT[:4])
    endpoint = raftkv_cluster.endpoints[0]
    with Running(raftkvctl(endpoint, "run", "watch", "jobs/a")) as program:
        program.wait_printed(b"gathering: 0 of at least 2 nodes ready")
        write(raftkv_client, SCRIPT[4:])
        program.wait_printed(b"lost 1 of 2: a")
        assert ctl(raftkv_cluster, "delete", "jobs/a", "--yes", "--force").code == 0
        program.wait_printed(b"the run was deleted")
        write(raftkv_client, SCRIPT[:6])
        program.wait_printed(b"generation 1 runs: a (rank 0), b (rank 1)", 2)
        done = program.stop()
    assert (done.code, done.errors) == (0, "")
    printed = [line.split("  ", 1)[1] for line in done.output.decode().splitlines()]
    for line in (
        "node a-1 is there (10.0.0.0, 1 slot)",
        "fault in generation 1: rank 1 on b was killed by SIGKILL",
        "generation 1 is over: rank 1 on b was killed by SIGKILL",
        "node b-1 is gone",
        "node c-1 came (10.0.0.2, 1 slot)",
        "generation 2 runs: a (rank 0), c (rank 1); re-formed in 0.50 s",
        "arbiter is c-1",
        "generation 2 is over: lost 1 of 2: a",
    ):
        assert printed.count(line) == 1, (line, printed)


def test_rewritten_status_is_printed_once() -> None:
    narrator, folded = Narrator(), fold(KEYS, [])
    printed: list[Line] = []
    broken = [state(1, "broken", 9.0, "b fell"), state(1, "broken", 9.0, "b fell")]
    more = State(1, "broken", "b fell", joined=1, min_nodes=2, max_nodes=4, time=9.0)
    for revision, content in enumerate([*broken, more], 2):
        change = read_change(KEYS, KEYS.state.encode(), content.encode(), revision)
        assert change is not None
        folded.apply(change)
        printed += narrator.lines(change, folded)
    assert [line.text for line in printed] == [
        "generation 1 is over: b fell",
        "gathering: 0 of at least 2 nodes ready",
        "gathering: 1 of at least 2 nodes ready",
    ]


# ---- delete, and what goes wrong


def test_a_run_is_deleted_alone(raftkv_cluster, raftkv_client) -> None:
    write(raftkv_client, SCRIPT)
    raftkv_client.put(f"{KEYS.base}store/2/x", b"1")
    raftkv_client.put("/raftkv/horovod/jobs/a/000000000002/key/global/0", b"10.0.0.5:1")
    raftkv_client.put("/raftkv/horovod/jobs/a/000000000002/done/global/0", b"")
    inner = RunKeys("jobs/a/b")
    write(raftkv_client, [("state", state(1, CLOSED, 1.0))], inner)
    raftkv_client.put("/raftkv/horovod/jobs/a/b/000000000002/key/global/0", b"10.0.0.6:1")
    refused = ctl(raftkv_cluster, "delete", "jobs/a", "--yes")
    assert (refused.code, refused.output) == (1, b"")
    assert refused.errors == "Error: 1 node is alive in run 'jobs/a': end them first, or give --force\n"
    asked = ctl(raftkv_cluster, "delete", "jobs/a", "--force")
    assert (asked.code, asked.errors) == (128, "Error: there is no terminal to confirm it on: give --yes\n")
    assert raftkv_client.get(KEYS.state) is not None
    done = plain_of(ctl(raftkv_cluster, "delete", "jobs/a", "--force", "--yes", "--json"))
    assert done == {"run": "jobs/a", "deleted": 8}
    left = [item.key.decode() for item in raftkv_client.range("", prefix=True)]
    assert left == ["/raftkv/horovod/jobs/a/b/000000000002/key/global/0", inner.state]


def test_a_dead_run_needs_no_force(raftkv_cluster, raftkv_client) -> None:
    write(raftkv_client, [("state", state(1, RUNNING, 1.0)), ("round", GenerationRecord(1, members(B, C), 1.0))])
    assert text_of(ctl(raftkv_cluster, "delete", "jobs/a", "-y")) == "run 'jobs/a' is deleted: 2 keys\n"
    assert ctl(raftkv_cluster, "delete", "jobs/a", "-y").code == 1


def test_slots_of_a_deleted_run_go_to_others(raftkv_cluster, raftkv_client) -> None:
    """Runs of other teams may not see that it is dead: without a run of its own team it held them for ever."""
    dead = Claim("jobs/a", 1, nodes=(Need("a", "h", 8),), granted=("a",))
    waits = Claim("jobs/b", 2, nodes=(Need("b", "h", 8),))
    raftkv_client.put(f"{CLUSTER_ROOT}gpu/ledger", Ledger((dead, waits)).encode())
    write(raftkv_client, [("node/b", B)], RunKeys("jobs/b"))
    write(raftkv_client, [("state", state(1, RUNNING, 1.0))])
    assert text_of(ctl(raftkv_cluster, "delete", "jobs/a", "-y")) == "run 'jobs/a' is deleted: 1 key\n"
    (claim,) = Ledger.decode(raftkv_client.get(f"{CLUSTER_ROOT}gpu/ledger").value).claims
    assert (claim.run, claim.granted) == ("jobs/b", ("b",))


def closed(kv: raftkv.Client, run_id: str, age_s: float = 3600.0) -> None:
    ended = State(3, CLOSED, "succeeded", min_nodes=2, max_nodes=2, time=time.time() - age_s)
    write(kv, [("round", GenerationRecord(3, members(B, C), 1.0)), ("state", ended)], RunKeys(run_id))


def test_horovod_keys_of_the_next_run_of_an_id_stay(raftkv_cluster, raftkv_client, monkeypatch) -> None:
    """Delete nothing that begins after the run is gone: its workers would wait for the keys of their ranks."""
    closed(raftkv_client, "jobs/a")
    old, new = (f"/raftkv/horovod/jobs/a/00000000000{number}/key/global/0" for number in (3, 1))
    raftkv_client.put(old, b"10.0.0.5:1")
    read_ledgers = run_view.read_ledgers

    async def late(kv) -> list[KeyValue]:
        await kv.put(KEYS.state, state(1, RUNNING, 1.0).encode())
        await kv.put(new, b"10.0.0.6:1")
        return await read_ledgers(kv)

    monkeypatch.setattr(run_view, "read_ledgers", late)
    assert text_of(ctl(raftkv_cluster, "delete", "jobs/a", "-y")) == "run 'jobs/a' is deleted: 3 keys\n"
    assert (raftkv_client.get(old), raftkv_client.get(new).value) == (None, b"10.0.0.6:1")


@pytest.mark.parametrize("command", ["show", "timeline", "delete", "watch"])
def test_an_unknown_run_is_one_line(raftkv_cluster, command: str) -> None:
    ran = ctl(raftkv_cluster, command, "none")
    assert (ran.code, ran.output) == (1, b"")
    assert ran.errors == "Error: there is no run 'none'; `raftkvctl run list` lists the runs\n"


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["show"], 128, "run show needs RUN"),
        (["timeline", "a", "b"], 128, "run timeline needs RUN"),
        (["list", "a"], 128, 'unexpected argument "a": the command takes no arguments'),
        (["delete"], 128, "run delete needs RUN"),
        (["show", "a b"], 128, "run id 'a b' cannot be used"),
        (["show", "a", "-w", "protobuf"], 4, "protobuf not supported as output format"),
        (["exec", "--job", "j"], 128, "run exec needs a command"),
        (["exec", "--", "true"], 128, "--job is missing"),
        (["exec", "--job", "j", "--nnodes", "two", "--", "true"], 128, "--nnodes is a number or MIN:MAX, not 'two'"),
        (["exec", "--job", "j", "--nnodes", "9" * 5000, "--", "true"], 128, "--nnodes is a number or MIN:MAX, not '9"),
        (["exec", "--job", "j", "--nnodes", "4:2", "--", "true"], 128, "4:2 is not a number of nodes"),
        (["exec", "--job", "j", "--conf", "lease=1", "--", "true"], 128, "unknown option 'lease'"),
        (["exec", "--job", "j", "--env-style", "mpi", "--", "true"], 128, "unknown environment style 'mpi'"),
        (
            ["exec", "--job", "j", "--max-restarts", "-1", "--", "true"],
            1,
            "--max-restarts must be a whole number, 0 or more",
        ),
        (
            ["exec", "--job", "j", "--stop-grace", "-1s", "--", "true"],
            1,
            "--stop-grace must be a duration such as 300ms, 1.5s or 2m, 0s or more",
        ),
        (
            ["exec", "--job", "j", "--nproc-per-node", "0", "--", "true"],
            1,
            "--nproc-per-node must be a whole number, 1 or more",
        ),
    ],
)
def test_words_that_cannot_be(raftkv_cluster, words: list[str], code: int, text: str) -> None:
    ran = ctl(raftkv_cluster, *words)
    assert (ran.code, ran.output) == (code, b"")
    assert ran.errors.startswith(f"Error: {text}")
    assert ran.errors.count("\n") == 1


def test_texts() -> None:
    assert (ranks_text(3, 1), ranks_text(4, 4)) == ("3", "4-7")
    many = [Member(f"n-{number}", f"n{number}", slots=2) for number in range(10)]
    assert members_text(many[:2]) == "n0 (ranks 0-1), n1 (ranks 2-3)"
    assert members_text(many).endswith("n7 (ranks 14-15) and 2 more")
    assert clock(0.0) == ""
