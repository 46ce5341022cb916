"""Real torchrun agents and workers (gloo, CPU) on real clusters: one story, many facts, since processes are dear."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import raftkv
from bench.restart_job import BACKENDS, Job
from bench.stage import leader_of
from raftkv.cli.runs import Pattern, needs
from raftkv.training.records import CLOSED, RUNNING, SIGNAL, Fault, RunKeys, State
from tests import forked
from tests.cli.runner import run_ctl
from tests.procs import ETCD_FAST, RAFTKV, Cluster, free_port, wait_for

PATIENCE_S = 180.0
PATIENT = replace(BACKENDS["raftkv"], conf="lease_ttl=5,last_call_timeout=2,fault_limit=0")
"""The lease of the benchmark ends in a second: on a loaded machine an agent may get no processor for so long."""

RUN = "story"
AGENT = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=raftkv", "--nnodes=1"]
KEYS = RunKeys(RUN)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(RAFTKV, size=3) as cluster:
        yield cluster


@pytest.fixture
def kv(cluster: Cluster) -> Iterator[raftkv.Client]:
    with raftkv.connect(cluster.endpoints, timeout_s=30.0) as kv:
        yield kv


def state(kv: raftkv.Client) -> State:
    """What is going on in the run."""
    item = kv.get(KEYS.state)
    if item is None:
        raise AssertionError("the run has no state")
    return State.decode(item.value)


def restarts(job: Job, name: str) -> dict[int, int]:
    """Generation to the restarts that an agent had used up when it began."""
    text = job.agents[name].log.read_text(encoding="utf-8")
    return {int(generation): int(used) for generation, used in re.findall(r"generation (\d+), restarts (\d+)", text)}


def watched(agent: int) -> set[int]:
    """The processes for whose end an agent waits: it holds a pidfd of each."""
    found = set()
    for path in Path(f"/proc/{agent}/fdinfo").iterdir():
        with contextlib.suppress(OSError):
            found |= {int(pid) for pid in re.findall(r"^Pid:\t(\d+)$", path.read_text(encoding="ascii"), re.MULTILINE)}
    return found


def timeline(cluster: Cluster) -> str:
    """Return what the run says has happened in it, for the report of a failure."""
    return run_ctl(["--endpoints", ",".join(cluster.endpoints), "run", "timeline", RUN]).output


def world(job: Job, size: int, after: float = 0.0) -> int:
    """Wait for the next world; returns its generation."""
    return job.wait_world(size, after, cap_s=PATIENCE_S).generation


@pytest.mark.long
def test_a_job_continues_after_the_loss_of_any_node(cluster: Cluster, kv: raftkv.Client, tmp_path: Path) -> None:
    with Job(PATIENT, ",".join(cluster.endpoints), tmp_path / "job", RUN) as job:
        for name in "abc":
            job.start(name)
        first = job.wait_world(3, 0.0, cap_s=PATIENCE_S)
        assert first.generation == 1

        node = job.of_rank(first, 2)  # a worker: one new generation, and all nodes learn why
        wait_for(lambda: watched(node.process.pid) >= set(node.workers), "the agent to watch its worker", PATIENCE_S)
        struck_at = time.monotonic()
        node.kill_worker()
        second = job.wait_world(3, struck_at, cap_s=PATIENCE_S)
        assert second.generation == 2, timeline(cluster)
        fault = Fault.decode(kv.range(KEYS.faults(1), prefix=True).items[0].value)
        assert (fault.rank, fault.cause, fault.signal) == (2, SIGNAL, "SIGKILL")

        struck_at = time.monotonic()  # the node that hosts the store
        lost = job.of_rank(second, 0)
        lost.kill_node()
        assert world(job, 2, struck_at) == 3, timeline(cluster)

        leader_of(cluster).kill()  # a newcomer, while the cluster elects a leader
        struck_at = time.monotonic()
        job.start("d")
        assert world(job, 3, struck_at) == 4, timeline(cluster)
        for name in {"a", "b", "c"} - {lost.name}:
            used = restarts(job, name)
            assert used[4] == used[3], "a newcomer costs no other node a restart"

        struck_at = time.monotonic()  # an agent that gets SIGTERM does not end the run
        job.agents["d"].process.send_signal(signal.SIGTERM)
        assert job.agents["d"].process.wait(PATIENCE_S) != 0
        assert world(job, 2, struck_at) == 5, timeline(cluster)
        assert (state(kv).phase, state(kv).generation) == (RUNNING, 5)

        statuses = job.finish(PATIENCE_S)
        assert {name: got for name, got in statuses.items() if name not in (lost.name, "d")}.keys() == (
            {"a", "b", "c"} - {lost.name}
        )
        assert [got for name, got in statuses.items() if name not in (lost.name, "d")] == [0, 0], job.logs()
    assert (state(kv).phase, state(kv).reason) == (CLOSED, "finished")
    wait_for(
        lambda: {item.key.decode() for item in kv.range(KEYS.base, prefix=True)} == {KEYS.round, KEYS.state},
        "nothing but the record of the run to be left",
    )


NOTING = """
import os, pathlib, sys, threading
import torch
note = pathlib.Path(f"{os.environ['LOCAL_RANK']}.{os.environ['RAFTKV_EPOCH']}")
note.with_suffix(".new").write_text(str(os.getpid()))
note.with_suffix(".new").rename(note)
while not pathlib.Path("stop").exists():
    threading.Event().wait(0.02)
"""


@pytest.mark.long
def test_workers_were_started_before_they_were_needed(raftkv_cluster: raftkv.LocalCluster, tmp_path: Path) -> None:
    (tmp_path / "note.py").write_text(NOTING, encoding="utf-8")
    command = [*AGENT, f"--rdzv-endpoint={raftkv_cluster.endpoints[0]}", "--rdzv-id=ahead", "--max-restarts=2"]
    command += ["--nproc-per-node=2", "--rdzv-conf=prefork=torch", "note.py"]

    def worker(local_rank: int, generation: int) -> int:
        path = tmp_path / f"{local_rank}.{generation}"
        wait_for(path.exists, f"worker {path.name}", PATIENCE_S)
        return int(path.read_text(encoding="ascii"))

    log = tmp_path / "log"
    with log.open("wb") as output:
        agent = forked.start(command, cwd=tmp_path, environment=os.environ, log=output)
    with agent:
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children")
        workers = {worker(0, 1), worker(1, 1)}
        for generation in (2, 3):
            wait_for(lambda: len(children.read_text(encoding="ascii").split()) == 4, "two spares", PATIENCE_S)
            spares = {int(pid) for pid in children.read_text(encoding="ascii").split()} - workers
            wait_for(
                lambda workers=workers: watched(agent.pid) >= workers, "the agent to watch its workers", PATIENCE_S
            )
            os.kill(worker(1, generation - 1), signal.SIGKILL)
            workers = {worker(0, generation), worker(1, generation)}
            assert workers == spares
        (tmp_path / "stop").touch()
        assert agent.wait(PATIENCE_S) == 0, log.read_text()
    ran = run_ctl(["--endpoints", raftkv_cluster.endpoints[0], "run", "timeline", "ahead", "--json"])
    faults = [fault for generation in json.loads(ran.output)["epochs"] for fault in generation["faults"]]
    assert len(faults) == 2
    assert (1, "SIGKILL") in [(fault["rank"], fault["signal"]) for fault in faults]  # torch may see its own end first
    assert not any(Path(f"/proc/{pid}").exists() for pid in spares)


@pytest.mark.long
def test_it_works_on_etcd(tmp_path: Path) -> None:
    with Cluster(ETCD_FAST) as etcd, Job(BACKENDS["etcd"], etcd.endpoints[0], tmp_path / "job", RUN) as job:
        job.start("a")
        job.start("b")
        assert world(job, 2) == 1
        assert job.finish(PATIENCE_S) == {"a": 0, "b": 0}, job.logs()


def run_agent(endpoint: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return forked.run([*AGENT, f"--rdzv-endpoint={endpoint}", *words], cwd=folder, timeout_s=PATIENCE_S)


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((), "raftkv: --rdzv-id is missing: name the job, as in --rdzv-id=job7 (torchrun's default, 'none', would be "
         "one run for all jobs that are not named)\n"),
        (("--rdzv-id=a/b",),
         "raftkv: --rdzv-id=a/b: torchrun makes a directory of that name, so it cannot have a slash\n"),
    ],
)  # fmt: skip
def test_a_job_without_a_usable_name_is_refused_in_a_line(tmp_path: Path, words: tuple[str, ...], line: str) -> None:
    done = run_agent("127.0.0.1:1", tmp_path, *words, "train.py")
    assert (done.returncode, done.stderr) == (1, line)


@pytest.mark.long
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_worker_that_ends_at_once_is_a_fault(raftkv_cluster, tmp_path, restarts):
    (tmp_path / "quick.py").write_text("import sys; sys.exit(3)")
    words = ("--rdzv-id=quick", f"--max-restarts={restarts}", "quick.py")
    assert run_agent(raftkv_cluster.endpoints[0], tmp_path, *words).returncode != 0
    ran = run_ctl(["--endpoints", raftkv_cluster.endpoints[0], "run", "timeline", "quick", "--json"])
    generations = json.loads(ran.output)["epochs"]
    faults = [fault for generation in generations for fault in generation["faults"]]
    assert [(fault["rank"], fault["exit_code"]) for fault in faults] == [(0, 3)] * (restarts + 1)
    with raftkv_cluster.connect() as kv:
        closed = State.decode(kv.get(RunKeys("quick").state).value)
    assert closed.phase == CLOSED
    assert "exited with 3" in closed.reason


@pytest.mark.long
def test_an_agent_that_fails_itself_does_not_finish_the_run(raftkv_cluster, tmp_path):
    """torch cannot make its directory of logs: its own traceback, and a run that has failed."""
    words = ("--rdzv-id=agent", "--log-dir=/dev/null/logs", "--redirects=3", "train.py")
    assert run_agent(raftkv_cluster.endpoints[0], tmp_path, *words).returncode != 0
    with raftkv_cluster.connect() as kv:
        item = kv.get(RunKeys("agent").state)
    assert item is None or "failed" in State.decode(item.value).reason


@pytest.mark.long
def test_a_failure_is_one_line(tmp_path: Path) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    done = run_agent(endpoint, tmp_path, "--rdzv-id=job", "--rdzv-conf=connect_timeout=0.5", "no-script.py")
    assert done.returncode == 1
    assert re.fullmatch(
        rf"raftkv: run 'job' cannot be joined: the cluster at {endpoint} "
        r"did not answer within 0\.5 s \(.*refused\); start it or correct the endpoints, and start this again .*\n",
        done.stderr,
    ), done.stderr


WORKER_OF_A_USER = """
import raftkv.training
with raftkv.training.join() as run:
    print(f"gathered {run.all_gather('x', b'%d' % run.rank)}")
"""


@pytest.mark.long
def test_agents_and_workers_are_the_user_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the role of the run alone; its password is in no command line, and in nothing that is printed."""
    (tmp_path / "work.py").write_text(WORKER_OF_A_USER)
    (tmp_path / "pw").write_text("canary-pw\n")
    with Cluster(RAFTKV, flags=("--bcrypt-cost=4",)) as cluster:
        (endpoint,) = cluster.endpoints
        with raftkv.connect(endpoint) as kv:
            for name in ("root", "alice"):
                kv.users.add(name, "canary-pw")
            kv.users.grant_role("root", "root")
            kv.roles.add("job")
            for one in needs(Pattern.of_runs("job-*")):
                kv.roles.grant("job", one.kind, one.key, one.range_end)
            kv.users.grant_role("alice", "job")
            kv.users.enable_auth()
        monkeypatch.setenv("RAFTKV_USER", "alice")
        monkeypatch.setenv("RAFTKV_PASSWORD_FILE", str(tmp_path / "pw"))
        done = run_agent(endpoint, tmp_path, "--rdzv-id=job-1", "--nproc-per-node=2", "work.py")
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("gathered [b'0', b'1']") == 2
        other = run_agent(endpoint, tmp_path, "--rdzv-id=others-1", "--nproc-per-node=1", "work.py")
        assert "permission denied" in other.stderr
        for text in (done.stdout, done.stderr, other.stdout, other.stderr, cluster.logs()):
            assert "canary-pw" not in text
