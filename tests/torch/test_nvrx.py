"""nvidia-resiliency-ext's in-process restart on a store in raftkv: an exception, then the death of rank 0."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from raftkv.client.local import LocalCluster
from raftkv.errors import ConfigError
from tests.foreign.environments import interpreter

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "nvrx_inprocess.py"
PATIENCE_S = 180.0


def _rank(directory: Path, endpoints: str, rank: int) -> subprocess.Popen[bytes]:
    command = [str(interpreter("nvrx")), str(EXAMPLE), f"--endpoints={endpoints}", "--job=nvrx", "--fail-at=3"]
    environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "3", "OMP_NUM_THREADS": "1"}
    with (directory / f"{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [*command, f"--until={directory / 'stop'}"], env=environment, stdout=log, stderr=subprocess.STDOUT
        )


def test_a_failed_step_and_the_death_of_rank_0_are_survived(tmp_path: Path, raftkv_cluster: LocalCluster) -> None:
    ranks = [_rank(tmp_path, ",".join(raftkv_cluster.endpoints), rank) for rank in range(3)]

    def said(rank: int) -> str:
        return (tmp_path / f"{rank}.log").read_text(errors="replace")

    def wait(condition: Callable[[], bool], whom: list[subprocess.Popen[bytes]]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, "\n".join(said(rank)[-2000:] for rank in range(3))
            with pytest.raises(subprocess.TimeoutExpired):
                whom[0].wait(0.1)

    try:
        wait(lambda: all(re.search(r"iteration 1 rank \d of 3", said(rank)) for rank in range(3)), ranks)
        processes = [set(re.findall(r"pid (\d+) iteration", said(rank))) for rank in range(3)]
        assert processes == [{str(process.pid)} for process in ranks]  # nobody was started again

        ranks[0].kill()
        wait(lambda: all(re.search(r"iteration \d rank \d of 2", said(rank)) for rank in (1, 2)), ranks[1:])
        (tmp_path / "stop").touch()
        assert [process.wait(PATIENCE_S) for process in ranks[1:]] == [0, 0], said(1) + said(2)
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def test_without_the_package_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext", None)
    monkeypatch.delitem(sys.modules, "raftkv.torch.nvrx", raising=False)
    with pytest.raises(ConfigError, match=r"pip install nvidia-resiliency-ext==0\.4\.1"):
        __import__("raftkv.torch.nvrx")
