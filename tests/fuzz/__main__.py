"""python -m tests.fuzz --target NAME --seconds N    |    --all --minutes 20    |    --list

Each target runs in a process of its own under a limit of address space, so that an absurd allocation fails instead of
being granted and never touched. With ``--engine atheris`` (where that package is installed; it is no dependency)
inputs are guided by coverage instead of outcomes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import subprocess
import sys
import time

from tests.fuzz.engine import run
from tests.fuzz.oracle import FuzzFailure
from tests.fuzz.targets import TARGETS

ADDRESS_SPACE_BYTES = 4 << 30


def main() -> int:
    """Run what the command line asks for; 1 if there was a finding."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), default=[])
    parser.add_argument("--all", action="store_true", help="every target, one after the other")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each target")
    parser.add_argument("--minutes", type=float, help="for all together")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--engine", choices=("outcomes", "atheris"), default="outcomes")
    given = parser.parse_args()
    if given.list:
        print(*sorted(TARGETS), sep="\n")
        return 0
    names = sorted(TARGETS) if given.all else given.target
    seconds = given.minutes * 60 / max(1, len(names)) if given.minutes else given.seconds
    print(f"seed {given.seed}, {len(names)} targets of {seconds:.1f} s", flush=True)
    context = multiprocessing.get_context("fork")
    failed = []
    for name in names:
        if given.engine == "atheris":
            words = [sys.executable, "-m", "tests.fuzz.coverage_engine", name, f"{seconds:.0f}", str(given.seed)]
            status: int | None = subprocess.run(words, check=False).returncode
        else:
            process = context.Process(target=_one, args=(name, given.seed, seconds))
            process.start()
            process.join()
            status = process.exitcode
        if status:
            failed.append(name)
    print(f"findings: {', '.join(failed) or 'none'}")
    return bool(failed)


def _one(name: str, seed: int, seconds: float) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    try:
        print(run(TARGETS[name], seed, seconds=seconds), flush=True)
    except FuzzFailure as failure:
        print(failure, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main())
