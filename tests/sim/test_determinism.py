"""Same seed, same events: within a process, and in processes that hash strings differently."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.sim.swarm import run_seed

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "from tests.sim.swarm import run_seed; print(*[run_seed(s).digest for s in range(1, 6)])"


def digests(hash_seed: str) -> list[str]:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.split()


def test_digest_is_a_function_of_the_seed() -> None:
    first, second, other = run_seed(21), run_seed(21), run_seed(22)
    assert first.digest == second.digest
    assert len(first.digest) == 16
    assert first.digest != other.digest
    assert (first.events_count, first.acknowledged_count) == (second.events_count, second.acknowledged_count)


def test_digest_does_not_depend_on_string_hashing() -> None:
    one, other = digests("1"), digests("2")
    assert len(one) == 5
    assert one == other
