"""A run for programs without an event loop, and a run whose raft leader dies."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import raftkv
import raftkv.training
from raftkv.training import GenerationOver, Run, RunClosed

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[raftkv.LocalCluster]:
    with raftkv.local(size=3) as three:
        yield three


def join(cluster: raftkv.LocalCluster, run_id: str, count: int = 2, **options: Any) -> list[Run]:
    """That many ranks in this process, by rank."""
    settings = {
        "min_nodes": 1,
        "max_nodes": 2,
        "expected_nodes": count,
        "last_call_timeout_s": PATIENCE_S,
        "disconnect_grace_s": 0.05,
        "lease_ttl_s": 10,
        **options,
    }
    runs = in_all(range(count), lambda _: raftkv.training.join(run_id, endpoints=cluster.endpoints, **settings))
    return sorted(runs, key=lambda run: run.rank)


def in_all(items: Any, what: Callable[[Any], Any]) -> list[Any]:
    with ThreadPoolExecutor() as threads:
        return list(threads.map(what, items, timeout=PATIENCE_S))


@pytest.mark.long
def test_the_api_without_an_event_loop(cluster):
    runs = join(cluster, "blocking")

    def work(run: Run) -> tuple[Any, ...]:
        with run:
            run.barrier("b", timeout_s=PATIENCE_S)
            config = run.broadcast("config", "c" if run.rank == 0 else None)
            names = run.all_gather("names", f"rank {run.rank}")
            root = run.gather("g", str(run.rank), root=1)
            numbers = run.counter("numbers")
            number = numbers.add()
            with run.elect("writer") as term:
                assert term.leads
                run.kv.put(f"written/{run.rank}", str(term.token), fence=term)
            run.put("mine", b"1")
            run.barrier("all have drawn")
            return run.world_size, config, names, root, number, numbers.value, run.get("mine")

    said = in_all(runs, work)
    assert sorted(line[4] for line in said) == [1, 2]
    assert [line[:4] + line[5:] for line in said] == [
        (2, b"c", [b"rank 0", b"rank 1"], None, 2, b"1"),
        (2, b"c", [b"rank 0", b"rank 1"], [b"0", b"1"], 2, b"1"),
    ]
    with cluster.connect() as kv:
        assert kv.count("written/", prefix=True) == 2
        assert kv.count("/raftkv/train/blocking/", prefix=True) == 2


@pytest.mark.long
def test_change_is_told_on_a_thread_of_its_own(cluster):
    runs = join(cluster, "change")
    told = threading.Event()
    threads: list[threading.Thread] = []

    def on_change(run: Run) -> None:
        threads.append(threading.current_thread())
        run.rejoin()  # may block, and use the client
        told.set()

    runs[0].on_change(on_change)
    runs[1].leave()
    assert told.wait(PATIENCE_S)
    assert threads[0] is not threading.main_thread()
    assert (runs[0].generation, runs[0].rank, runs[0].world_size, runs[0].changed) == (2, 0, 1, False)
    runs[0].close("done")
    runs[0].close("twice is as good as once")


def test_a_run_closed_by_another_rank(cluster):
    runs = join(cluster, "closed")
    runs[0].close("enough")
    assert runs[1].wait_change(PATIENCE_S)
    with pytest.raises(GenerationOver):
        runs[1].barrier("b")
    with pytest.raises(RunClosed, match="enough"):
        runs[1].rejoin()
    runs[1].leave()


FORKED = """
import os, sys
import raftkv, raftkv.training

run = raftkv.training.join("forked", endpoints=sys.argv[1], min_nodes=1, max_nodes=1, lease_ttl_s=60)
child = os.fork()
if child == 0:
    try:
        run.barrier("b")
    except raftkv.Forked:
        run.leave()
        run.kv.put("from the child", b"")  # the client is usable: it has a connection of its own
        os._exit(0)
    os._exit(1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
run.barrier("b")
run.close()
"""


@pytest.mark.long
def test_a_forked_child_has_no_part_in_it(cluster):
    words = [sys.executable, "-c", FORKED, ",".join(cluster.endpoints)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
    with cluster.connect() as kv:
        assert kv.get("from the child") is not None


@pytest.mark.long
def test_a_program_that_never_leaves_its_run_ends_in_silence(cluster):
    """Its node is gone with its client; that it cannot register again need not be told."""
    program = "import sys, raftkv.training; run = raftkv.training.join('unleft', endpoints=sys.argv[1])"
    words = [sys.executable, "-c", program, ",".join(cluster.endpoints)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_rejoin_after_leave_fails_at_once(cluster):
    """A run that has left asked itself, without a pause, whether it was registered: its thread did nothing else."""
    with cluster.connect() as kv:
        run = raftkv.training.join("left", kv=kv, min_nodes=1, lease_ttl_s=60)
        run.leave()
        ended = threading.Event()

        def come_back():
            with pytest.raises(RunClosed, match="this node has left"):
                run.rejoin(timeout_s=1)
            ended.set()

        threading.Thread(target=come_back, daemon=True).start()
        assert ended.wait(90)


@pytest.mark.long
def test_a_barrier_while_the_raft_leader_dies(cluster):
    runs = join(cluster, "failover")
    with cluster.connect(timeout_s=PATIENCE_S) as kv:
        leader = next(member.endpoint for member in kv.status() if member.is_leader)
    victim = next(member for member in cluster.members if member.endpoint == leader)
    victim.kill()
    try:
        in_all(runs, lambda run: run.barrier("b"))
        assert in_all(runs, lambda run: run.all_gather("g", str(run.rank))) == [[b"0", b"1"]] * 2
        assert {run.generation for run in runs} == {1}
        assert not any(run.changed for run in runs)
    finally:
        victim.restart()
    in_all(runs, lambda run: run.finish())


WORKER = """
import raftkv.training
with raftkv.training.join() as run:
    run.barrier("b")
    print(run.is_worker, run.rank, run.run_id, run.generation, run.all_gather("g", str(run.rank)))
"""


@pytest.mark.long
def test_workers_of_run_exec_find_their_run(cluster):
    command = [sys.executable, "-m", "raftkv.cli.ctl", "--endpoints", ",".join(cluster.endpoints)]
    command += ["run", "exec", "--job", "exec", "--nnodes", "1:1", "--nproc-per-node", "2", "--"]
    command += [sys.executable, "-c", WORKER]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    expected = [f"[rank{rank}]: True {rank} exec 1 [b'0', b'1']" for rank in range(2)]
    assert sorted(done.stdout.splitlines()) == expected
