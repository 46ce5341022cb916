"""etcdctl: ranges and watches of any size, see `report`; the program is the second last word of the command line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

from report import Task, run

TOOL = sys.argv[-2]


def ranged(task: Task) -> Iterator[bytes]:
    """The values of a prefix in one answer."""
    yield from _ctl(task, "get", "--prefix", task.prefix, "--print-value-only", lines=task.count)


def watched(task: Task) -> Iterator[bytes]:
    """The values of the events under a prefix since a revision: the last of an event's three lines."""
    output = _ctl(task, "watch", "--prefix", task.prefix, "--rev", str(task.revision), lines=3 * task.count)
    for number, line in enumerate(output):
        if number % 3 == 2:
            yield line


def _ctl(task: Task, *words: str, lines: int) -> Iterator[bytes]:
    command = [TOOL, "--endpoints", f"{task.host}:{task.port}", "--command-timeout", f"{task.timeout_s}s", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        if process.stdout is None:
            raise RuntimeError("no pipe")
        for _ in range(lines):
            line = process.stdout.readline()
            if not line:
                break
            yield line.removesuffix(b"\n")
        process.kill()


if __name__ == "__main__":
    run(ranged, watched)
