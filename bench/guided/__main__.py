"""Makes the native wheel that `make guided` lays beside the sources: six minutes on two cores.

    python -m bench.guided              dist/native/raftkv-....whl
    python -m bench.guided --locked     with what is installed, as in CI

    wheel that counts -> three members of it, under loads of `raftkvctl bench` -> counts -> wheel laid out by them

Code that no load has reached is compiled as in the plain build (`RAFTKV_NATIVE=1 pip wheel .`), which does the same and
takes half the time. A compiler that is not gcc makes that one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from requirements import native
from tests.procs import Cluster, Program

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / "dist" / "native"
COUNTING = ROOT / "build" / "counting"
"""The packages of the wheel that counts."""
LOADS = (
    "put --total 1500",
    "put --clients 10 --conns 10 --total 5000",
    "put --clients 100 --conns 100 --total 20000",
    "put --clients 1000 --conns 100 --total 20000",
    "range --clients 100 --conns 100 --total 20000",
    "range --clients 100 --conns 100 --total 20000 --consistency s",
    "txn-put --clients 100 --conns 100 --total 10000",
    "mixed --clients 100 --conns 10 --total 10000",
    "watch --streams 100 --watch-per-stream 10 --total 500",
    "watch-latency --total 300",
    "lease-keepalive --clients 100 --conns 10 --total 20000",
    "lock --clients 10 --total 300",
)
"""Words of `raftkvctl bench`: what members are for. More of one kind would only make its branches no less likely."""


def main(words: Sequence[str]) -> int:
    """Make the wheel; return the exit code."""
    if words not in ([], ["--locked"]):
        print("usage: python -m bench.guided [--locked]", file=sys.stderr)
        return 2
    flags = ["--no-build-isolation"] if words else []
    if native.missing() or not native.is_gcc():
        build(flags, {})
        return 0
    print("the hot path, compiled so that it counts its calls", flush=True)
    for counts in (ROOT / "build").rglob("*.gcda"):  # of earlier sources
        counts.unlink()
    unzip(build(flags, {native.GUIDE: "count"}))
    with Cluster(
        Program("raftkv", ("env", f"PYTHONPATH={COUNTING}", sys.executable, member_file())), size=3
    ) as members:
        for number, load in enumerate(LOADS, 1):
            print(f"load {number} of {len(LOADS)}: {load}", flush=True)
            send(load, members.endpoints)
        for member in members.members:
            member.stop()
    print("the hot path, laid out by the counts", flush=True)
    build(flags, {native.GUIDE: "use"})
    return 0


def build(flags: Sequence[str], environment: dict[str, str]) -> Path:
    """Make a native wheel in ``WHEELS``, where it is the only one; SystemExit: it could not be made."""
    for old in (*(ROOT / "build").glob("lib*"), *(ROOT / "build").glob("bdist*"), WHEELS):
        shutil.rmtree(old, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", *flags, "-w", str(WHEELS), str(ROOT)]
    status = subprocess.run(pip, env={**os.environ, "RAFTKV_NATIVE": "1", **environment}, check=False).returncode
    if status:
        raise SystemExit(status)  # pip has said why
    (wheel,) = WHEELS.glob("*.whl")
    return wheel


def unzip(wheel: Path) -> None:
    """Lay out the wheel that counts, as an installation of it would be."""
    shutil.rmtree(COUNTING, ignore_errors=True)
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(COUNTING)


def member_file() -> str:
    """Return what a member is started by."""
    return str(Path(__file__).with_name("member.py"))


def send(load: str, endpoints: Sequence[str]) -> None:
    """Load the members; SystemExit: calls have failed."""
    ctl = [sys.executable, "-m", "raftkv.cli.ctl", "bench", *load.split(), "--endpoints", ",".join(endpoints), "--json"]
    done = subprocess.run([*ctl, "--target-leader"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"load {load}: {done.stderr or done.stdout}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
