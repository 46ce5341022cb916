"""``raftkvctl run exec``: real nodes with real workers, on a real cluster."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

import raftkv
from raftkv.training.config import guess_address
from raftkv.urls import parse_endpoints
from tests.cli.programs import Running, raftkvctl
from tests.cli.runner import run_ctl
from tests.procs import wait_for

TIMEOUT_S = 120.0
WORKER = Path(__file__).with_name("run_worker.py")
JOB = "jobs/exec"


def node(cluster: raftkv.LocalCluster, name: str, what: str, directory: Path, *words: str) -> Running:
    """A node whose workers do that."""
    conf = "lease_ttl=10,last_call_timeout=20"
    given = ["run", "exec", "--job", JOB, "--node-name", name, "--local-addr", "127.0.0.1", "--conf", conf, *words]
    command = [sys.executable, "-I", "-S", str(WORKER), str(directory), what]
    return Running([*raftkvctl(",".join(cluster.endpoints), *given), "--", *command])


def written(directory: Path, name: str) -> dict:
    """What a worker has written; waits for it."""
    path = directory / name
    wait_for(path.exists, f"{name} of a worker in {sorted(os.listdir(directory))}", TIMEOUT_S)
    return json.loads(path.read_text(encoding="utf-8"))


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def timeline(cluster: raftkv.LocalCluster) -> dict:
    ran = run_ctl(["--endpoints", cluster.endpoints[0], "run", "timeline", JOB, "--json"])
    assert (ran.code, ran.errors) == (0, "")
    return json.loads(ran.output)


def test_a_killed_worker_is_followed_by_one_generation_and_success_closes_the_run(
    raftkv_cluster, raftkv_client, tmp_path
) -> None:
    words = ("--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "1")
    with (
        node(raftkv_cluster, "a", "fail", tmp_path, *words) as first,
        node(raftkv_cluster, "b", "fail", tmp_path, *words) as second,
    ):
        assert [first.wait().code, second.wait().code] == [0, 0], first.errors + second.errors
        errors = first.errors + second.errors
    assert sorted(os.listdir(tmp_path)) == [f"{generation}-{rank}.json" for generation in (1, 2) for rank in range(4)]
    found = {name.partition(".")[0]: written(tmp_path, name) for name in os.listdir(tmp_path)}
    for generation in (1, 2):
        ranks = [found[f"{generation}-{rank}"] for rank in range(4)]
        assert [one["LOCAL_RANK"] for one in ranks] == ["0", "1", "0", "1"]
        assert {one["WORLD_SIZE"] for one in ranks} == {"4"}
        assert len({(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in ranks}) == 1
        configs = [json.loads(one["TF_CONFIG"]) for one in ranks]
        assert len({tuple(config["cluster"]["worker"]) for config in configs}) == 1
        assert len(set(configs[0]["cluster"]["worker"])) == 4
        assert [config["task"]["index"] for config in configs] == [0, 1, 2, 3]
        assert {one["RAFTKV_RUN_ID"] for one in ranks} == {JOB}
        assert {one["RAFTKV_ENDPOINTS"] for one in ranks} == {raftkv_cluster.endpoints[0]}
    assert found["1-0"]["RAFTKV_NODE_ID"] == found["2-0"]["RAFTKV_NODE_ID"]
    assert sorted(found[f"2-{rank}"]["RAFTKV_RESTARTS"] for rank in range(4)) == ["0", "0", "1", "1"]
    assert errors.count("rank 3 on ") >= 1
    assert "was killed by SIGKILL" in errors
    history = timeline(raftkv_cluster)
    assert [(generation["epoch"], generation["cause"]) for generation in history["epochs"]] == [(1, "signal"), (2, "")]
    assert history["epochs"][0]["root_fault"]["rank"] == 3
    assert history["epochs"][0]["recovery"]["seconds"] >= 0
    assert (history["state"]["phase"], history["state"]["reason"]) == ("closed", "succeeded")
    left = [item.key.decode().removeprefix(f"/raftkv/train/{JOB}/") for item in raftkv_client.range("", prefix=True)]
    assert [name for name in left if not name.startswith("strike/")] == ["round", "state"]


@pytest.mark.long
def test_the_exit_code_is_the_workers_and_the_others_are_told(raftkv_cluster, tmp_path) -> None:
    words = ("--nnodes", "2", "--env-style", "torch")
    with (
        node(raftkv_cluster, "a", "exit", tmp_path, *words) as first,
        node(raftkv_cluster, "b", "exit", tmp_path, *words) as second,
    ):
        codes = sorted([first.wait().code, second.wait().code])
        errors = first.errors + second.errors
    assert codes == [1, 7]
    assert "rank 0 on " in errors
    assert " exited with 7" in errors
    assert "the run was closed: rank 0 on " in errors
    assert "no restarts left of 0" in errors
    assert "TF_CONFIG" not in written(tmp_path, "1-0.json")


@pytest.mark.long
def test_a_worker_that_falls_with_another_costs_its_node_no_restart(raftkv_cluster, tmp_path) -> None:
    words = ("--nnodes", "2", "--env-style", "torch", "--max-restarts")
    with node(raftkv_cluster, "a", "collateral", tmp_path, *words, "0") as first:
        first.wait_complained("gathering: 1 ready")
        with node(raftkv_cluster, "b", "collateral", tmp_path, *words, "1") as second:
            assert [first.wait().code, second.wait().code] == [0, 0], first.errors + second.errors
    history = timeline(raftkv_cluster)
    assert len(history["epochs"]) == 2
    assert history["epochs"][0]["root_fault"]["host"] == "b"
    assert [written(tmp_path, f"2-{rank}.json")["RAFTKV_RESTARTS"] for rank in (0, 1)] == ["0", "1"]


@pytest.mark.long
def test_nodes_come_and_go_and_leave_no_process_behind(raftkv_cluster, tmp_path) -> None:
    words = ("--nnodes", "1:2", "--env-style", "torch,pet", "--conf", "last_call_timeout=0")
    with node(raftkv_cluster, "a", "wait", tmp_path, *words) as first:
        alone = written(tmp_path, "1-0.json")
        with node(raftkv_cluster, "b", "wait", tmp_path, *words) as second:
            written(tmp_path, "2-0.json")
            theirs = written(tmp_path, "2-1.json")
            assert written(tmp_path, "1-0.term")["pid"] == alone["pid"]
            assert (theirs["WORLD_SIZE"], theirs["PET_NODE_RANK"]) == ("2", "1")
            assert not is_running(alone["child"])
            second.process.kill()
            for pid in (theirs["pid"], theirs["child"]):
                wait_for(lambda pid=pid: not is_running(pid), "the end of what a killed node had started", TIMEOUT_S)
        last = written(tmp_path, "3-0.json")
        assert (last["WORLD_SIZE"], last["RAFTKV_RESTARTS"]) == ("1", "0")
        done = first.stop(signal.SIGTERM)
        assert done.code == 128 + signal.SIGTERM
        assert written(tmp_path, "3-0.term")["pid"] == last["pid"]
        assert not is_running(last["child"])
    causes = [generation["cause"] for generation in timeline(raftkv_cluster)["epochs"]]
    assert causes[0] == "scale up"
    assert causes[1] in ("heartbeat lost", "disconnected")


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "passed", "last"),
    [
        ((), ("SIGUSR1", "SIGUSR2", "SIGQUIT"), "SIGQUIT"),
        pytest.param((), ("SIGHUP",), "SIGHUP", marks=pytest.mark.long),
        pytest.param((), ("SIGINT", "SIGUSR1", "SIGQUIT"), "SIGINT", marks=pytest.mark.long),
        (("--signals-to-handle", "SIGTERM,SIGUSR1"), ("SIGUSR2", "SIGUSR1"), "SIGUSR1"),
    ],
)
def test_signals_reach_the_workers_and_those_to_handle_end_the_node(raftkv_cluster, tmp_path, words, passed, last):
    words = ("--stop-grace", "60s", "--conf", "last_call_timeout=0", "--env-style", "torch", *words)
    with node(raftkv_cluster, "a", "signals", tmp_path, *words) as first:
        worker = written(tmp_path, "1-0.json")
        for name in passed:
            first.process.send_signal(getattr(signal, name))
            assert written(tmp_path, f"1-0.{name}")["pid"] == worker["pid"]
        assert first.stop(signal.SIGTERM).code == 128 + getattr(signal, last)
        assert written(tmp_path, "1-0.term")["pid"] == worker["pid"]


@pytest.mark.long
def test_workers_meet_at_the_address_by_which_rank_0_speaks_to_the_cluster(raftkv_cluster, tmp_path) -> None:
    words = raftkvctl(raftkv_cluster.endpoints[0], "run", "exec", "--job", JOB, "--conf", "last_call_timeout=0")
    with Running([*words, "--", sys.executable, "-I", "-S", str(WORKER), str(tmp_path), "end"]) as program:
        assert program.wait().code == 0
    place = guess_address(parse_endpoints(raftkv_cluster.endpoints[0]))
    assert written(tmp_path, "1-0.json")["MASTER_ADDR"] == place


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "code", "text"),
    [("no-such-command", 127, "no such file or directory"), ("/", 126, "permission denied")],
)
def test_a_command_that_cannot_be_run(raftkv_cluster, command: str, code: int, text: str) -> None:
    words = raftkvctl(raftkv_cluster.endpoints[0], "run", "exec", "--quiet", "--job", JOB)
    with Running([*words, "--conf", "last_call_timeout=0", "--", command]) as program:
        done = program.wait()
    assert (done.code, done.output) == (code, b"")
    assert done.errors == f"Error: cannot start '{command}': {text}"


@pytest.mark.long
def test_the_minimum_never_comes(raftkv_cluster) -> None:
    words = raftkvctl(raftkv_cluster.endpoints[0], "run", "exec", "--job", JOB, "--nnodes", "2:4")
    with Running([*words, "--conf", "join_timeout=0.5", "--", "true"]) as program:
        done = program.wait()
    assert done.code == 1
    assert "raftkvctl: gathering: " in done.errors
    assert done.errors.splitlines()[-1].startswith(f"Error: run '{JOB}' did not begin within 0.5 s: ")


PRINTING = (
    "import os, sys; print('rank', os.environ['RANK'], 'says', end=' '); print('this'); print('why', file=sys.stderr)"
)


def print_all(cluster: raftkv.LocalCluster, *words: str) -> tuple[int, list[str], list[str]]:
    """Two workers that print; the exit code and the lines of both streams."""
    conf = ("--conf", "last_call_timeout=0", "--nproc-per-node", "2")
    given = ["run", "exec", "--quiet", "--job", JOB, "--env-style", "torch", *conf, *words]
    with Running([*raftkvctl(cluster.endpoints[0], *given), "--", sys.executable, "-c", PRINTING]) as program:
        done = program.wait()
    return done.code, sorted(done.output.decode().splitlines()), sorted(done.errors.splitlines())


SAID = [f"[rank{rank}]: rank {rank} says this" for rank in range(2)]
WHY = [f"[rank{rank}]: why" for rank in range(2)]


@pytest.mark.long
def test_output_of_workers_is_prefixed_with_ranks(raftkv_cluster) -> None:
    assert print_all(raftkv_cluster) == (0, SAID, WHY)
    assert print_all(raftkv_cluster, "--no-prefix") == (0, [f"rank {rank} says this" for rank in range(2)], ["why"] * 2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "shown", "files"),
    [
        ((), (SAID, WHY), {"0/stdout.log", "0/stderr.log", "1/stdout.log", "1/stderr.log"}),
        pytest.param(
            ("--redirects", "3"),
            ([], []),
            {"0/stdout.log", "0/stderr.log", "1/stdout.log", "1/stderr.log"},
            marks=pytest.mark.long,
        ),
        (("-r", "0:1"), (SAID[1:], WHY), {"0/stdout.log"}),
        pytest.param(("-t", "1:3"), (SAID, WHY), {"1/stdout.log", "1/stderr.log"}, marks=pytest.mark.long),
        (("--tee", "2", "--local-ranks-filter", "1"), (SAID[1:], WHY[1:]), {"0/stderr.log", "1/stderr.log"}),
    ],
    ids=["log-dir", "redirects", "one redirected", "one teed", "one shown"],
)
def test_output_of_workers_is_kept_in_files(raftkv_cluster, tmp_path, words, shown, files) -> None:
    base = tmp_path / "made" / "logs"
    assert print_all(raftkv_cluster, "--log-dir", str(base), *words) == (0, *shown)
    (run,) = base.iterdir()
    assert run.name.startswith("jobs_exec_")
    assert {str(path.relative_to(run / "epoch_1")) for path in run.rglob("*.log")} == files
    for name in files:
        rank = name.partition("/")[0]
        text = {"stdout.log": f"rank {rank} says this\n", "stderr.log": "why\n"}[Path(name).name]
        assert (run / "epoch_1" / name).read_text(encoding="utf-8") == text


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--signals-to-handle", "SIGTERM,SIGKILL"), "--signals-to-handle is a list of signals, as in "),
        (("--tee", "4"), "--tee is 0, 1 (stdout), 2 (stderr), 3 (both) or LOCAL_RANK:NUMBER,..., not '4'"),
        (("--redirects", "0:x"), "--redirects is 0, 1 (stdout), "),
        (("--local-ranks-filter", "all"), "--local-ranks-filter is a list of numbers, as in 0,1, not 'all'"),
        (("--log-dir", "/dev/null/logs"), "--log-dir: /dev/null/logs: not a directory"),
    ],
)
def test_flags_that_cannot_be_read(raftkv_cluster, words, text) -> None:
    with Running(
        [*raftkvctl(raftkv_cluster.endpoints[0], "run", "exec", "--job", JOB, *words), "--", "true"]
    ) as program:
        done = program.wait()
    assert (done.code, done.output) == (128, b"")
    assert done.errors.startswith(f"Error: {text}")
