"""Run etcdctl and raftkvctl as processes that stay: watches, locks, elections.

Owns starting one, waiting for what it prints, feeding it lines, signalling it. Output goes to files, so that nothing
is lost when a process is killed.

    with Running(raftkvctl(endpoint, "watch", "a")) as program:
        program.wait_printed(b"PUT")
        done = program.stop()
"""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from tests import forked
from tests.cli.runner import Ran
from tests.procs import find_tool, wait_for

TIMEOUT_S = 90.0
PATIENT = ("--dial-timeout", "60s")
"""For measurements, which try each connection once."""


def raftkvctl(endpoints: str, *words: str) -> list[str]:
    """The command line of raftkvctl."""
    return [sys.executable, "-m", "raftkv.cli.ctl", "--endpoints", endpoints, *words]


def etcdctl(endpoints: str, *words: str) -> list[str]:
    """The command line of etcdctl 3.5.1."""
    return [find_tool("etcdctl"), "--endpoints", endpoints, *words]


LOG_IN = "import os, sys; os.login_tty(0); os.execv(sys.argv[1], sys.argv[1:])"
"""Makes the terminal on standard input the process's own, as a login does, so that Ctrl-C reaches it."""


class InTerminal:
    """A process in a terminal of its own, so many columns wide; ``shown`` is all that it has drawn so far."""

    def __init__(
        self, command: Sequence[str], *, columns: int = 80, environment: Mapping[str, str] | None = None
    ) -> None:
        self._master, slave = os.openpty()
        termios.tcsetwinsize(slave, (24, columns))
        self.process = subprocess.Popen(
            [sys.executable, "-c", LOG_IN, *command],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm", **(environment or {})},
        )
        os.close(slave)
        self._drawn: list[bytes] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> InTerminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        os.close(self._master)

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 65536)
            except OSError:  # the last process has left the terminal
                return
            if not data:
                return
            self._drawn.append(data)

    @property
    def shown(self) -> str:
        """What it has drawn, without colours and movements of the cursor."""
        text = b"".join(self._drawn).decode(errors="replace")
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r\n", "\n")

    def wait_shown(self, pattern: str) -> None:
        """Wait until it has drawn what a regular expression describes; it must not end before."""

        def drawn() -> bool:
            ended = self.process.poll() is not None
            if re.search(pattern, self.shown):
                return True
            assert not ended, self.shown
            return False

        wait_for(drawn, f"{pattern!r} on the terminal of {self.process.args}", TIMEOUT_S)

    def press(self, keys: bytes) -> None:
        """Type, e.g. ``b"\\x03"`` for Ctrl-C."""
        os.write(self._master, keys)

    def wait(self) -> int:
        """Wait for the end; the exit code."""
        code = self.process.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        return code


def _start(
    command: Sequence[str], output: IO[bytes], errors: IO[bytes], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a program that has a pipe as its standard input, and leads a session of its own."""
    if not forked.is_forkable(command):
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=errors, env=environment, start_new_session=True
        )
    reading, writing = os.pipe()
    with open(reading, "rb") as source:
        process = forked.spawn(
            command, (source, output, errors), cwd=Path.cwd(), environment=environment, is_session=True
        )
    process.stdin = io.FileIO(writing, "wb")
    return process


class Running:
    """A process; the block's end kills it if it is still there."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._directory = tempfile.TemporaryDirectory()
        base = Path(self._directory.name)
        self._output, self._errors = base / "output", base / "errors"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("ETCDCTL_")}
        given = {**inherited, **(environment or {})}
        with self._output.open("wb") as output, self._errors.open("wb") as errors:
            self.process = _start(command, output, errors, given)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(TIMEOUT_S)
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()
        self._directory.cleanup()

    @property
    def output(self) -> bytes:
        """What it has printed so far."""
        return self._output.read_bytes()

    @property
    def errors(self) -> str:
        """What it has complained of so far, without the log lines of Go's clients."""
        lines = self._errors.read_text(errors="backslashreplace").splitlines()
        return "\n".join(line for line in lines if line.strip() and not line.startswith("{"))

    def feed(self, text: str) -> None:
        """Send a line to its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode())
        self.process.stdin.flush()

    def end_input(self) -> None:
        """Close its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def wait_printed(self, text: bytes, times: int = 1) -> None:
        """Wait until the text stands in the output so many times; fails at once if the process ends before."""

        def printed() -> bool:
            ended = self.process.poll() is not None
            if self.output.count(text) >= times:
                return True
            assert not ended, f"exit {self.process.returncode}: {self.output!r} {self.errors}"
            return False

        wait_for(printed, f"{text!r} in {self.process.args}", TIMEOUT_S)

    def wait_complained(self, text: str) -> None:
        """Wait until the text stands in the standard error."""
        wait_for(lambda: text in self.errors, f"{text!r} in the errors of {self.process.args}", TIMEOUT_S)

    def stop(self, number: signal.Signals = signal.SIGINT) -> Ran:
        """Send a signal and wait for the end."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> Ran:
        """Wait for the end by itself; a death by signal is the code that a shell shows."""
        code = self.process.wait(TIMEOUT_S)
        return Ran(code if code >= 0 else 128 - code, self.output, self.errors)
