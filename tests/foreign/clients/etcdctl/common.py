"""What the scenarios of etcdctl share: one command at a time, or one that runs on and tells line after line.

The program is the third last word of the command line; `etcdctl` is given all endpoints unless the script says
otherwise.
"""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from report import WAIT_S, Report

TOOL = sys.argv[-3]


def command(report: Report, *words: str, endpoints: list[str] | None = None) -> list[str]:
    """Return a whole command line."""
    return [TOOL, "--endpoints", ",".join(endpoints or report.endpoints), *words]


def ctl(report: Report, *words: str, given: str = "", endpoints: list[str] | None = None) -> list[str]:
    """Run one command; return the lines it printed, those of stderr too, without the scenario's prefix."""
    done = subprocess.run(
        command(report, *words, endpoints=endpoints),
        input=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    lines = [normalized(report, line) for line in done.stdout.splitlines()]
    return [*lines, f"exit {done.returncode}"] if done.returncode else lines


LEASE = re.compile(r"\b[0-9a-f]{10,16}\b")


def normalized(report: Report, line: str) -> str:
    """Return a line without what differs from run to run: the prefix, ids of leases, what log lines say beside."""
    if line.startswith('{"level"'):
        return "<log>"
    return LEASE.sub("<lease>", line.replace(report.prefix, ""))


class Running:
    """A command that runs on; its lines come one by one."""

    def __init__(self, report: Report, process: subprocess.Popen[str]) -> None:
        self.report = report
        self.process = process
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._complaints: list[str] = []
        for read in (self._read, self._read_complaints):
            threading.Thread(target=read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self._lines.put(normalized(self.report, line.rstrip("\n")))
        self._lines.put(None)

    def _read_complaints(self) -> None:
        for line in self.process.stderr or ():
            self._complaints.append(line.rstrip("\n"))

    def line(self) -> str:
        """Return the next line.

        :raises EOFError: there is none: the command ended.
        """
        line = self._lines.get(timeout=WAIT_S)
        if line is None:
            status = self.process.wait(WAIT_S)
            raise EOFError(f"the command ended with {status}: {self._complaints[-3:]}")
        return line

    def lines(self, count: int) -> list[str]:
        """Return the next `count` lines."""
        return [self.line() for _ in range(count)]

    def rest(self) -> list[str]:
        """Wait for the end; return what was left to print."""
        return [line for line in iter(lambda: self._lines.get(timeout=WAIT_S), None) if line is not None]

    def type(self, text: str) -> None:
        """Type a line."""
        if self.process.stdin is not None:
            self.process.stdin.write(text + "\n")
            self.process.stdin.flush()

    def leave(self) -> int:
        """Interrupt the command as Ctrl-C does; return its status."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(WAIT_S)


@contextmanager
def running(report: Report, *words: str, endpoints: list[str] | None = None) -> Iterator[Running]:
    """Run a command until the block ends."""
    process = subprocess.Popen(
        command(report, *words, endpoints=endpoints),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "ETCDCTL_API": "3"},
    )
    try:
        yield Running(report, process)
    finally:
        process.kill()
        process.wait()


def answer(report: Report, *words: str) -> Any:
    """Run a command that succeeds and return what it prints as JSON, untouched."""
    done = subprocess.run(command(report, *words, "-w", "json"), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def begin(report: Report) -> str:
    """Set the revision that others are counted from; return the next, from which a watch sees all of the scenario."""
    report.base = answer(report, "get", "none")["header"]["revision"]
    return str(report.base + 1)


def transaction(report: Report, *success: str) -> list[str]:
    """Run a transaction without compares, as it is typed: what to compare, what follows, what follows if not."""
    return ctl(report, "txn", given="\n" + "".join(f"{line}\n" for line in success) + "\n\n")


def until_created(report: Report, key: str, watched: Running) -> None:
    """Write `key` until the watch tells it: from then on the watch sees everything (it never says it is open)."""
    first: list[str] = []

    def hear() -> None:
        first.extend(watched.lines(3))

    listener = threading.Thread(target=hear)
    listener.start()
    number = 0
    while listener.is_alive():
        number += 1
        ctl(report, "put", key, f"open {number}")
        listener.join(0.05)
    last = int(first[2].split()[1])
    for _ in range(number - last):
        watched.lines(3)
