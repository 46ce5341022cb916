"""One member of a throwaway cluster: its command line, its process, its log.

Owns a child process and nothing else: who is started when, and what is removed in the end, is ``local``'s. Members run
in the process group of the cluster's guard (see ``local.guard``), so a Ctrl-C in the terminal does not reach them.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from raftkv.errors import RaftKVError

HOST: Final = "127.0.0.1"
READY_TIMEOUT_S: Final = 30.0
_POLL_S: Final = 0.01
_HEALTH_TIMEOUT_S: Final = 1.0
_LOG_TAIL_BYTES: Final = 4096
_PACKAGE_ROOT: Final = str(Path(__file__).resolve().parents[3])


class LocalClusterError(RaftKVError):
    """A member of a local cluster could not be started, or died; one line says which and what it last said."""


@dataclass
class LocalMember:
    """One member. ``endpoint`` is where clients reach it, ``log_path`` where its log is."""

    name: str
    directory: Path
    client_port: int
    peer_port: int
    group: int
    initial_cluster: str = ""
    flags: tuple[str, ...] = ()
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def endpoint(self) -> str:
        """``host:port`` for clients."""
        return f"{HOST}:{self.client_port}"

    @property
    def peer_url(self) -> str:
        """Where the other members reach it."""
        return f"http://{HOST}:{self.peer_port}"

    @property
    def log_path(self) -> Path:
        """What it prints, over all its lives."""
        return self.directory / f"{self.name}.log"

    @property
    def is_running(self) -> bool:
        """Whether its process is alive."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """End it as ``kill -9`` does: nothing is flushed, nobody is told. Harmless if it does not run."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Ask it to stop and wait until it has; a member that is paused is woken first."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
        self._end(signal.SIGTERM)

    def pause(self) -> None:
        """Freeze it (SIGSTOP): its connections stay open and nobody answers.

        Raises:
            LocalClusterError: it does not run.
        """
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused member run on.

        Raises:
            LocalClusterError: it does not run.
        """
        self._signal(signal.SIGCONT)

    def restart(self, *, timeout_s: float = READY_TIMEOUT_S) -> None:
        """End it if it runs, start it again on the same data and ports, and wait until it serves.

        A member of three serves once it knows a leader, so restart the majority with ``start`` first.

        Raises:
            LocalClusterError: it did not start.
        """
        self.kill()
        self.start()
        self.wait_ready(timeout_s=timeout_s)

    def start(self) -> None:
        """Start the process and return at once; see ``wait_ready``.

        Raises:
            LocalClusterError: it runs already, or the process could not be made.
        """
        if self.is_running:
            raise LocalClusterError(f"member {self.name} runs already")
        try:
            with self.log_path.open("ab") as log:
                self._process = subprocess.Popen(
                    self._command(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=self.directory,
                    env=_environment(),
                    process_group=self.group,
                )
        except OSError as error:
            raise LocalClusterError(f"cannot start member {self.name}: {error.strerror or error}") from None

    def wait_ready(self, *, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until it serves: it knows a leader and answers reads.

        Raises:
            LocalClusterError: it ended instead, or took longer than that.
        """
        deadline = time.monotonic() + timeout_s
        while not self._is_healthy():
            process = self._process
            if process is None or _ended_within(process, _POLL_S):
                raise LocalClusterError(f"member {self.name} did not start: {self.last_words()}")
            if time.monotonic() > deadline:
                raise LocalClusterError(
                    f"member {self.name} did not serve within {timeout_s:g} s:"
                    f" {self.last_words()} (log: {self.log_path})"
                )

    def last_words(self) -> str:
        """The last line of its log that says something, without the frame of a log record."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(self.log_path.stat().st_size - _LOG_TAIL_BYTES, 0))
                lines = log.read().decode("utf-8", "replace").split("\n")
        except OSError:
            return "it has no log"
        return next((_message(line.strip()) for line in reversed(lines) if line.strip()), "it has said nothing")

    def _command(self) -> list[str]:
        client_url = f"http://{self.endpoint}"
        return [
            *(sys.executable, "-m", "raftkv", "serve"),
            f"--name={self.name}",
            f"--data-dir={self.directory / self.name}",
            f"--listen-client-urls={client_url}",
            f"--advertise-client-urls={client_url}",
            f"--listen-peer-urls={self.peer_url}",
            f"--initial-advertise-peer-urls={self.peer_url}",
            f"--initial-cluster={self.initial_cluster}",
            f"--initial-cluster-token={self.directory.name}",
            *self.flags,
        ]

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection(HOST, self.client_port, timeout=_HEALTH_TIMEOUT_S)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None or self._process.poll() is not None:
            raise LocalClusterError(f"member {self.name} does not run")
        self._process.send_signal(number)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(number)
            process.wait()


def _environment() -> dict[str, str]:
    """The caller's, without the settings that would reach a member (ETCD_*), and with this very raftkv first."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
    path = kept.get("PYTHONPATH", "")
    kept["PYTHONPATH"] = f"{_PACKAGE_ROOT}{os.pathsep}{path}" if path else _PACKAGE_ROOT
    kept.pop("PYTHONOPTIMIZE", None)
    return kept


def _ended_within(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _message(line: str) -> str:
    try:
        record = json.loads(line)
    except ValueError:
        return line
    return str(record.get("msg", line)) if isinstance(record, dict) else line
