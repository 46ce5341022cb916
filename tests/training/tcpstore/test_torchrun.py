"""Stock torchrun, c10d and all, over the gateway: it outlives the raft leader, and node 0, killed together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

import raftkv
from tests import forked
from tests.training.tcpstore.tcpstore_client import gateway

if TYPE_CHECKING:
    from raftkv.client.local import LocalCluster

WORKER = Path(__file__).with_name("torchrun_worker.py")
PATIENCE_S = 180.0


class Line(NamedTuple):
    """What a worker notes."""

    process: int
    agent: int
    rank: int
    world_size: int


def _agent(port: int, directory: Path, name: str) -> subprocess.Popen[bytes]:
    # An agent that a busy machine holds up for some seconds is not dead: c10d would leave it out of the world.
    options = "is_host=0,last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=15,join_timeout=120"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"),
        *("--rdzv-id=job", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--local-addr=127.0.0.1"),
        *("--monitor-interval=0.1", f"--rdzv-conf={options}"),
        *(str(WORKER), str(directory / "log"), str(directory / "stop")),
    ]
    # With the store shared, torch 2.13 does not recover from the loss of a worker, gateway or not.
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    with (directory / f"{name}.log").open("wb") as log:
        return forked.start(command, cwd=directory, environment=environment, log=log)


def _lines(directory: Path) -> list[Line]:
    log = directory / "log"
    texts = log.read_text().splitlines() if log.exists() else []
    return [Line(*map(int, text.split())) for text in texts]


def _wait_world(directory: Path, size: int, agents: list[subprocess.Popen[bytes]]) -> list[Line]:
    """The last workers, once all of a world of that size run."""
    deadline = time.monotonic() + PATIENCE_S
    while len(world := [line for line in _lines(directory)[-size:] if line.world_size == size]) < size:
        ended = [agent.returncode for agent in agents if agent.poll() is not None]
        assert not ended, f"agents ended with {ended}: {_said(directory)}"
        assert time.monotonic() < deadline, _said(directory)
        _pause(agents[0])
    return world


def _pause(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(0.1)
    except subprocess.TimeoutExpired:
        return


def _said(directory: Path) -> str:
    return "\n".join(f"{path.name}: {path.read_text(errors='replace')[-2000:]}" for path in directory.glob("*log"))


def _kill_leader(cluster: LocalCluster) -> None:
    with cluster.connect() as kv:
        leader = next(status.endpoint for status in kv.status() if status.member_id == status.leader_id)
    cluster.members[cluster.endpoints.index(leader)].kill()


@contextmanager
def _ended(agents: list[subprocess.Popen[bytes]], directory: Path) -> Iterator[None]:
    """No process is left behind by any failure."""
    try:
        yield
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
        for line in _lines(directory):
            _kill(line.process)


def _kill(process: int) -> None:
    try:
        if str(WORKER) in Path(f"/proc/{process}/cmdline").read_text():
            os.kill(process, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        return


@pytest.mark.long
def test_a_job_outlives_the_raft_leader_and_its_first_node(tmp_path: Path) -> None:
    with raftkv.local(3) as cluster, gateway(cluster.endpoints, "--name=torchrun") as port:
        agents = [_agent(port, tmp_path, name) for name in ("first", "second")]
        with _ended(agents, tmp_path):
            world = _wait_world(tmp_path, 2, agents)
            assert {line.rank for line in world} == {0, 1}
            first = next(line for line in world if line.rank == 0)
            victim = next(agent for agent in agents if agent.pid == first.agent)
            survivor = next(agent for agent in agents if agent is not victim)

            _kill_leader(cluster)
            victim.kill()
            _kill(first.process)

            _wait_world(tmp_path, 1, [survivor])
            (tmp_path / "stop").touch()
            assert survivor.wait(PATIENCE_S) == 0, _said(tmp_path)
