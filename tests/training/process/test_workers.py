"""Workers that end, seen by their parent without a wait of its own; real processes."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raftkv.training.process import faults
from raftkv.training.process.faults import End, MemoryEvents, Worker, WorkerWatch, end_of
from raftkv.training.records import EXIT, OUT_OF_MEMORY, SIGNAL
from tests.procs import wait_for

WAIT_S = 90
RUN = "job-of-test-workers"
Starter = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def ends() -> queue.Queue[End]:
    return queue.Queue()


@pytest.fixture
def watch(ends: queue.Queue[End]) -> Iterator[WorkerWatch]:
    with WorkerWatch(ends.put, run_id=RUN) as watch:
        yield watch


@pytest.fixture
def start() -> Iterator[Starter]:
    """Starts a worker as an agent does; all are killed at the end."""
    started: list[subprocess.Popen[bytes]] = []

    def start(code: str = "input()", rank: int = 0, run_id: str = RUN, **more: str) -> subprocess.Popen[bytes]:
        environment = {"RANK": str(rank), "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": run_id, **more}
        process = subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, env=environment)
        started.append(process)
        wait_for(lambda: shows_its_environment(process.pid), "the end of its exec")
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def shows_its_environment(pid: int) -> bool:
    """Popen returns while the kernel is still making the new process image: its environment is empty until then.

    A process that is ending has no environment any more (ESRCH), some time before it can be waited for.
    """
    try:
        return b"RANK=" in Path(f"/proc/{pid}/environ").read_bytes() or _has_ended(pid)
    except ProcessLookupError:
        return _has_ended(pid)


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def let_go(worker: subprocess.Popen[bytes]) -> None:
    """The worker's ``input()`` returns; no caller waits for it yet."""
    if worker.stdin is not None:
        worker.stdin.write(b"\n")
        worker.stdin.flush()


def test_ends_are_told_with_rank_and_cause_and_the_agent_still_gets_the_status(watch, ends, start):
    killed, finished, asked = start(rank=7), start(rank=8), start(rank=9)
    start(rank=1, run_id="of another job")
    assert watch.look() == watch.look() == 3
    killed.kill()
    first = ends.get(timeout=WAIT_S)
    assert (first.worker.rank, first.signal, first.is_fault, first.is_request) == (7, "SIGKILL", True, False)
    let_go(finished)
    second = ends.get(timeout=WAIT_S)
    assert (second.worker.rank, second.exit_code, second.is_fault) == (8, 0, False)
    asked.terminate()
    assert ends.get(timeout=WAIT_S).is_request
    assert [worker.wait() for worker in (killed, finished, asked)] == [-signal.SIGKILL, 0, -signal.SIGTERM]
    assert not watch.living
    assert ends.empty()


@pytest.mark.parametrize("place", ["asked", "told"])
def test_a_lack_of_memory_hides_no_end(start: Starter, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """The thread ended at the first one, when the kernel also kills workers: the agent heard of no end any more."""
    ends: queue.Queue[End] = queue.Queue()
    failures = [MemoryError(), MemoryError()]

    def starved(call: Callable[..., Any]) -> Callable[..., Any]:
        def try_it(*arguments: Any) -> Any:
            if failures and threading.current_thread() is not threading.main_thread():
                raise failures.pop()
            return call(*arguments)

        return try_it

    monkeypatch.setattr(faults, "STARVED_S", 0.001)
    told = starved(ends.put) if place == "told" else ends.put
    with WorkerWatch(told, run_id=RUN) as watch:
        workers = [start(rank=rank) for rank in (3, 4)]
        assert watch.look() == 2
        if place == "asked":
            monkeypatch.setattr(os, "waitid", starved(os.waitid))
        for worker in workers:
            let_go(worker)
        assert {ends.get(timeout=WAIT_S).worker.rank for _ in workers} == {3, 4}
    assert not failures
    assert ends.empty()


def test_who_is_told_of_an_end_may_stop_the_watch_while_others_end(start: Starter) -> None:
    told: queue.Queue[int] = queue.Queue()
    both = threading.Event()

    def stop(end: End) -> None:
        assert both.wait(WAIT_S)
        watch.stop()
        told.put(end.worker.rank)

    descriptors = len(os.listdir("/proc/self/fd"))
    watch = WorkerWatch(stop, run_id=RUN)
    workers = [start(rank=rank) for rank in (5, 6)]
    watch.look()
    for worker in workers:
        worker.kill()
    wait_for(lambda: not watch.living, "both ends")
    both.set()
    assert told.get(timeout=WAIT_S) in (5, 6)
    watch.stop()
    wait_for(lambda: len(os.listdir("/proc/self/fd")) == descriptors + len(workers), "the last thread's end")


def test_a_worker_that_exits_is_told_with_the_exception_that_torch_wrote_down(watch, ends, start, tmp_path):
    error_file = tmp_path / "error.json"
    error_file.write_text('{"message": {"message": "RuntimeError: no data\\nmore"}}')
    worker = start("input(); raise SystemExit(3)", rank=2, TORCHELASTIC_ERROR_FILE=str(error_file))
    watch.look()
    let_go(worker)
    fault = ends.get(timeout=WAIT_S).fault(5, "node-a", "host-a")
    assert (fault.cause, fault.exit_code, fault.rank, fault.generation) == (EXIT, 3, 2, 5)
    assert str(fault) == "rank 2 on host-a exited with 3: RuntimeError: no data"


def test_error_file_that_is_none_costs_the_message_alone(tmp_path: Path) -> None:
    """A deep nesting ended the agent, and a pipe without a writer held its loop."""
    deep, pipe = tmp_path / "deep", tmp_path / "pipe"
    deep.write_text("[" * 4000)
    os.mkfifo(pipe)
    status = os.waitid_result((1, 0, signal.SIGCHLD, 3, os.CLD_EXITED))
    for file in (deep, pipe, tmp_path):
        end = end_of(status, Worker(1, error_file=str(file)))
        assert (end.exit_code, end.message) == (3, "")


def test_a_worker_that_was_started_by_others_can_be_added(watch, ends, start):
    worker = start(run_id="of another job")
    watch.add(worker.pid, rank=4)
    assert watch.look() == 1
    worker.kill()
    assert ends.get(timeout=WAIT_S).worker == Worker(worker.pid, 4)


def test_worker_reaped_by_the_agent_is_not_reported(watch: WorkerWatch, ends: queue.Queue[End], start: Starter) -> None:
    gone, stays = start("pass", rank=0), start(rank=1)
    gone.wait()
    watch.add(gone.pid, rank=0)
    watch.look()
    assert [worker.rank for worker in watch.living] == [1]
    watch.stop()
    watch.stop()
    stays.kill()
    stays.wait()
    assert watch.look() == 0
    assert ends.empty()


def test_children_are_found_without_the_kernels_list_of_them(watch, ends, start, tmp_path):
    proc = tmp_path / "proc"
    (proc / "self" / "task").mkdir(parents=True)
    worker = start(rank=3)
    for pid in (worker.pid, os.getppid()):
        (proc / str(pid)).mkdir()
        for name in ("stat", "environ"):
            (proc / str(pid) / name).write_bytes(Path(f"/proc/{pid}/{name}").read_bytes())
    with WorkerWatch(ends.put, run_id=RUN, proc=proc) as other:
        assert other.look() == 1
    assert watch.look() == 1


def test_child_before_its_exec_is_looked_at_again(ends: queue.Queue[End], start: Starter, tmp_path: Path) -> None:
    worker = start(rank=3)
    for pid in ("self", str(worker.pid)):
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "environ").write_bytes(b"HOME=/root\0")
    (tmp_path / "self" / "task").mkdir()
    (tmp_path / str(worker.pid) / "stat").write_bytes(Path(f"/proc/{worker.pid}/stat").read_bytes())
    with WorkerWatch(ends.put, run_id=RUN, proc=tmp_path) as watch:
        assert watch.look() == 0
        real = Path(f"/proc/{worker.pid}/environ").read_bytes()
        (tmp_path / str(worker.pid) / "environ").write_bytes(real)
        assert watch.look() == 1


def test_elsewhere_nothing_is_watched(watch: WorkerWatch, start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults.sys, "platform", "darwin")
    watch.add(start().pid)
    assert watch.look() == 0


@pytest.fixture
def groups(tmp_path: Path) -> tuple[Path, Path]:
    """A stand-in for /proc with one process, and for /sys/fs/cgroup."""
    (tmp_path / "proc" / "1").mkdir(parents=True)
    (tmp_path / "proc" / "vmstat").write_text("pgfault 1\noom_kill 40\n")
    return tmp_path / "proc", tmp_path / "cgroup"


def place(root: Path, path: str, text: str) -> Path:
    """A file below a stand-in."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)
    return root / path


@pytest.mark.parametrize(
    ("participant", "file", "text"),
    [
        ("0::/pod/a\n", "pod/a/memory.events", "oom 1\noom_kill 2\n"),
        ("0::/of/the/host\n", "memory.events", "oom_kill 2\n"),
        ("4:cpu,memory:/x\n0::/\n", "memory/x/memory.oom_control", "under_oom 0\noom_kill 2\n"),
        ("4:memory:/host\n", "memory/memory.oom_control", "oom_kill 2\n"),
    ],
)
def test_the_kernels_count_of_memory_kills_is_found(groups, participant, file, text):
    proc, cgroups = groups
    place(proc, "1/cgroup", participant)
    counted = place(cgroups, file, text)
    before = MemoryEvents.of(1, *groups)
    assert (before.place, before.kills) == (str(counted), 2)
    assert not before.again().grew_since(before)
    counted.write_text("oom_kill 3\n")
    assert before.again().grew_since(before)


def test_memory_kills_fall_back_to_the_machine_then_to_none(groups: tuple[Path, Path]) -> None:
    assert MemoryEvents.of(1, *groups).kills == 40
    (groups[0] / "vmstat").unlink()
    nothing = MemoryEvents.of(1, *groups)
    assert nothing.again() == nothing == MemoryEvents("", 0)


def test_a_kill_while_the_count_goes_up_is_out_of_memory(groups, ends, start):
    worker = start(rank=5)
    counted = place(groups[1], "memory.events", "oom_kill 0\n")
    with WorkerWatch(ends.put, run_id=RUN, cgroups=groups[1]) as watch:
        watch.look()
        counted.write_text("oom_kill 1\n")
        worker.kill()
        fault = ends.get(timeout=WAIT_S).fault(1, "n", "h")
    worker.wait()
    assert (fault.cause, fault.signal) == (OUT_OF_MEMORY, "SIGKILL")
    assert str(fault) == f"rank 5 on h out of memory: the kernel killed process {worker.pid}"


def test_other_ends_are_named_as_they_were() -> None:
    def status(code: int, number: int) -> os.waitid_result:
        return os.waitid_result((1, 0, signal.SIGCHLD, number, code))

    crashed = end_of(status(os.CLD_DUMPED, signal.SIGSEGV), Worker(1, 0), out_of_memory=True).fault(1, "n", "h")
    assert (crashed.cause, crashed.signal) == (SIGNAL, "SIGSEGV")
    beside = end_of(status(os.CLD_EXITED, 1), Worker(1, 0), out_of_memory=True).fault(1, "n", "h")
    assert str(beside) == "rank 0 on h exited with 1: the kernel killed a process beside it for lack of memory"
    assert end_of(status(os.CLD_KILLED, 65), Worker(1, 0)).signal == "signal 65"


@pytest.mark.parametrize(
    ("end", "is_cause"),
    [
        (End(Worker(1), -1, "SIGKILL"), True),
        (End(Worker(1), -1, "SIGSEGV"), True),
        (End(Worker(1), -1, "SIGABRT"), False),
        (End(Worker(1), -1, "SIGTERM"), False),
        (End(Worker(1), 1), False),
    ],
)
def test_only_what_cannot_be_a_consequence_is_a_cause_at_once(end: End, is_cause: bool) -> None:
    assert end.is_fault
    assert end.is_cause == is_cause
