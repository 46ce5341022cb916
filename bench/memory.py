"""Resident memory of one member with a million keys, raftkv beside real etcd 3.5.1.

    python -m bench.memory [--keys 1000000]

Keys of 64 bytes and values of 256 are put through the client port; then the member is restarted, so that what is
measured is the state itself and not what writing it left behind. Anonymous memory is the process's own; file memory
is the mapped database, which the kernel may take back at any time. Prints one JSON object and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from bench.compare import PROGRAMS
from tests.procs import Cluster, Program

KEY_BYTES, VALUE_BYTES = 64, 256
QUOTA = ("--quota-backend-bytes", str(8 * 1024**3))


def fill(endpoint: str, keys: int) -> None:
    """Put every key once."""
    command = [
        *(sys.executable, "-m", "raftkv.cli.ctl", "bench", "put", "--sequential-keys", "--json"),
        *("--endpoints", endpoint, "--clients", "500", "--conns", "50"),
        *("--key-size", str(KEY_BYTES), "--val-size", str(VALUE_BYTES)),
        *("--key-space-size", str(keys), "--total", str(keys)),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def resident(pid: int) -> dict[str, float]:
    """Anonymous and file-backed resident memory, in MiB."""
    fields = dict(
        line.split(":", 1)
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        if ":" in line
    )
    return {name: round(int(fields[name].split()[0]) / 1024, 1) for name in ("VmRSS", "RssAnon", "RssFile")}


def measure(program: Program, keys: int) -> dict[str, dict[str, float]]:
    """Memory after the puts, and after a restart."""
    with Cluster(program.with_flags(*QUOTA)) as cluster:
        member = cluster.members[0]
        fill(member.endpoint, keys)
        after = {"written": resident(_server_pid(member.process.pid))} if member.process else {}
        member.stop()
        member.restart()
        if member.process is not None:
            after["restarted"] = resident(_server_pid(member.process.pid))
        return after


def _server_pid(pid: int) -> int:
    """The server itself: the wheel's `etcd` is a script that starts it as a child."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    return int(children[0]) if children else pid


def main() -> None:
    """Measure both programs."""
    parser = argparse.ArgumentParser(description="memory of a million keys")
    parser.add_argument("--keys", type=int, default=1_000_000)
    keys = parser.parse_args().keys
    print(json.dumps({program.name: measure(program, keys) for program in PROGRAMS}, indent=2))


if __name__ == "__main__":
    main()
