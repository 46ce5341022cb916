"""Workers of one node: how they end, how they are ended, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raftkv.client.guard import find_marked
from raftkv.training.process.supervisor import Settings, Supervisor, Workers, WorkerStartError, exit_code, free_port
from raftkv.training.records import Member
from raftkv.training.rendezvous.world import World
from tests.procs import wait_for

TIMEOUT_S = 120.0
PYTHON = [sys.executable, "-I", "-S", "-c"]
FOREVER = "import threading; threading.Event().wait()"
STUBBORN = f"""
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(os.environ["READY"], "w").close()
{FOREVER}
"""


@asynccontextmanager
async def started(code: str, count: int = 1, **variables: str) -> AsyncIterator[Workers]:
    """Workers of which nothing is left."""
    environments = [{**os.environ, **variables, "NUMBER": str(number)} for number in range(count)]
    async with asyncio.timeout(TIMEOUT_S):
        async with Workers.started([*PYTHON, code], environments, ranks=range(4, 4 + count)) as workers:
            yield workers
    assert find_marked(workers.mark) == []
    assert not os.path.exists(workers.directory)  # noqa: ASYNC240
    assert workers.alive == 0


@pytest.mark.parametrize(
    ("code", "cause", "told", "left_with"),
    [
        ("import os; os._exit(7)", "exit", "rank 4 on h exited with 7", 7),
        ("import os; os.kill(os.getpid(), 9)", "signal", "rank 4 on h was killed by SIGKILL", 137),
        ("import os; os.abort()", "signal", "rank 4 on h was killed by SIGABRT", 134),
        (
            "import json, os, sys; path = os.environ['TORCHELASTIC_ERROR_FILE'];"
            "json.dump({'message': {'message': 'ValueError: bad batch'}}, open(path, 'w')); sys.exit(1)",
            "exit",
            "rank 4 on h exited with 1: ValueError: bad batch",
            1,
        ),
    ],
)
async def test_an_end_is_told_with_its_cause(code: str, cause: str, told: str, left_with: int) -> None:
    async with started(code) as workers:
        end = await workers.wait()
    assert end is not None
    fault = end.fault(3, "h-1", "h")
    assert (fault.cause, str(fault), fault.generation, exit_code(end)) == (cause, told, 3, left_with)


async def test_the_first_fault_is_told_while_others_run() -> None:
    async with started(f"import os; os.environ['NUMBER'] == '1' and os._exit(3); {FOREVER}", count=3) as workers:
        end = await workers.wait()
        assert end is not None
        assert (end.worker.rank, end.worker.local_rank, end.exit_code) == (5, 1, 3)
        assert workers.alive == 2


async def test_success_is_all_of_them() -> None:
    async with started("pass", count=2) as workers:
        assert await workers.wait() is None


async def test_worker_that_ignores_sigterm_is_killed(tmp_path) -> None:
    ready = tmp_path / "ready"
    async with started(STUBBORN, READY=str(ready)) as workers:
        await asyncio.to_thread(wait_for, ready.exists, "the worker's signal handler", TIMEOUT_S)
        await workers.stop(grace_s=0.05)
        assert workers.processes[0].process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_worker_that_leaves_the_group_is_ended_all_the_same(tmp_path, number: signal.Signals) -> None:
    """A command as ``setsid train`` got no signal, and its node waited for its end for ever."""
    ready = tmp_path / "ready"
    ignores = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" if number == signal.SIGKILL else ""
    code = f"import os; os.setsid(); {ignores}\nopen(os.environ['READY'], 'w').close(); {FOREVER}"
    async with started(code, READY=str(ready)) as workers:
        await asyncio.to_thread(wait_for, ready.exists, "the worker's own session", TIMEOUT_S)
        await workers.stop(grace_s=TIMEOUT_S if number == signal.SIGTERM else 0.05)
        assert workers.processes[0].process.returncode == -number


async def test_a_worker_may_end_in_peace_when_asked() -> None:
    async with started(FOREVER) as workers:
        await workers.stop(grace_s=TIMEOUT_S)
        assert workers.processes[0].process.returncode == -signal.SIGTERM


async def test_cancelled_start_leaves_no_process() -> None:
    running: asyncio.Future[Workers] = asyncio.get_running_loop().create_future()

    async def hold() -> None:
        async with Workers.started([*PYTHON, FOREVER], [dict(os.environ)]) as workers:
            running.set_result(workers)
            await workers.wait()

    task = asyncio.create_task(hold())
    async with asyncio.timeout(TIMEOUT_S):
        workers = await running
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert find_marked(workers.mark) == []


AGENT = f"""
import asyncio, os, sys
from raftkv.training.process.supervisor import Workers

async def main():
    async with Workers.started([*{PYTHON!r}, {FOREVER!r}], [dict(os.environ)] * 2) as workers:
        print(workers.mark, workers.directory, flush=True)
        await workers.wait()

asyncio.run(main())
"""


@pytest.mark.long
def test_workers_do_not_outlive_an_agent_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", AGENT], stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        mark, directory = agent.stdout.readline().split()
        assert len(find_marked(mark)) == 2
        agent.kill()
    wait_for(lambda: not find_marked(mark) and not Path(directory).exists(), "the end of all workers", TIMEOUT_S)


@pytest.mark.parametrize(("command", "code"), [("no-such-command", 127), ("/", 126), ("nul\0byte", 126)])
def test_a_command_that_cannot_be_run_is_one_line(command: str, code: int) -> None:
    async def start() -> None:
        async with Workers.started([command], [{}]):
            pass

    with pytest.raises(WorkerStartError, match="cannot start") as caught:
        asyncio.run(start())
    assert caught.value.code == code
    assert "\n" not in str(caught.value)


def test_a_free_port_is_one_that_can_be_had() -> None:
    assert 10_000 <= free_port() < 32_000


class Away:
    """A node's part in a run whose cluster is out of reach: who closes the run waits for it.

    Attributes:
        closing: set when the supervisor closes.
        left: the node has left.
    """

    closed = False
    phase = None

    def __init__(self) -> None:
        self.closing = asyncio.Event()
        self.left = False
        self.nodes_waiting = 0

    def on_change(self, _: object) -> Callable[[], None]:
        return lambda: None

    async def next_world(self) -> World:
        return World("run", 1, (Member("n-1", "h", "127.0.0.1", 1),), 0, 1)

    async def publish(self, _: str) -> None:
        """Where workers meet."""

    async def report(self, _: object) -> None:
        self.nodes_waiting = 1

    async def close(self, _: str) -> None:
        self.closing.set()
        await asyncio.Event().wait()

    finish = close

    async def leave(self) -> None:
        self.left = True


class Nothing:
    """A client of a store that is empty."""

    async def range(self, *_: object, **options: object) -> list[object]:
        return []

    def txn(self, **_: object) -> Nothing:
        return self

    def then(self, *_: object) -> Nothing:
        return self

    async def commit(self) -> SimpleNamespace:
        return SimpleNamespace(results=[None, SimpleNamespace(items=[None])])


@pytest.mark.parametrize("code", ["import os; os._exit(7)", "pass"])
async def test_a_signal_ends_a_node_that_cannot_close_its_run(code: str) -> None:
    nothing: Any = Nothing()
    away: Any = Away()
    supervisor = Supervisor(nothing, away, Settings(command=(*PYTHON, code)))
    async with asyncio.timeout(TIMEOUT_S):
        running = asyncio.ensure_future(supervisor.run())
        await away.closing.wait()
        supervisor.stop(signal.SIGTERM)
        assert await running == 128 + signal.SIGTERM
    assert away.left
