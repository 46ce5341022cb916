"""One server process on this machine: its command line, its start, its readiness, its end, its log.

Owns what every launcher of local members does alike: ``raftkv.local``, ``raftkv cluster``, the tests, the benchmarks.
A subclass says what differs: the program, the token, the environment, the process group.

    member = ServerProcess("node1", directory, 2379, 2380, initial_cluster="node1=http://127.0.0.1:2380")
    member.start()
    member.wait_ready()
    member.kill()

Nothing sleeps: readiness is polled, and the poll waits on the process itself, so its death ends the wait at once.

Leaves out: who is started when, and what is removed in the end; those who own clusters know. The storms of ``jepsen``
have a launcher of their own, because they may import nothing of the system under test.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

from raftkv.errors import RaftKVError

HOST: Final = "127.0.0.1"
READY_TIMEOUT_S: Final = 30.0
POLL_S: Final = 0.01
_PORTS: Final = range(10_000, 32_000)
"""Below the range from which the kernel takes ports for outgoing connections: those are taken at any moment."""
_HEALTH_TIMEOUT_S: Final = 1.0
_LOG_TAIL_BYTES: Final = 4096


class LocalClusterError(RaftKVError):
    """A member of a local cluster could not be started, or died; one line says which and what it last said."""


@dataclass
class ServerProcess:
    """One member of a local cluster.

    Attributes:
        name: of the member.
        directory: where its data and its log are.
        client_port, peer_port: on the loopback interface.
        initial_cluster: NAME=URL of every member.
        flags: more of them, as on the command line of ``raftkv``.
        process: while it runs, and until it is found to have ended.
    """

    name: str
    directory: Path
    client_port: int
    peer_port: int
    initial_cluster: str = ""
    flags: Sequence[str] = ()
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    program: ClassVar[Sequence[str]] = (sys.executable, "-m", "raftkv", "serve")
    error: ClassVar[type[Exception]] = LocalClusterError

    @property
    def endpoint(self) -> str:
        """``host:port`` for clients."""
        return f"{HOST}:{self.client_port}"

    @property
    def client_url(self) -> str:
        """Where clients reach it."""
        return f"http://{self.endpoint}"

    @property
    def peer_url(self) -> str:
        """Where the other members reach it."""
        return f"http://{HOST}:{self.peer_port}"

    @property
    def data_dir(self) -> Path:
        """Where it keeps its data."""
        return self.directory / self.name

    @property
    def log_path(self) -> Path:
        """What it prints, over all its lives."""
        return self.directory / f"{self.name}.log"

    @property
    def token(self) -> str:
        """The token of the cluster."""
        return self.directory.name

    def command(self) -> list[str]:
        """Return its command line; the flags are etcd's, so both programs take it."""
        return [
            *self.program,
            f"--name={self.name}",
            f"--data-dir={self.data_dir}",
            f"--listen-client-urls={self.client_url}",
            f"--advertise-client-urls={self.client_url}",
            f"--listen-peer-urls={self.peer_url}",
            f"--initial-advertise-peer-urls={self.peer_url}",
            f"--initial-cluster={self.initial_cluster}",
            f"--initial-cluster-token={self.token}",
            *self.flags,
        ]

    def spawn_options(self) -> Mapping[str, Any]:
        """Return what else ``subprocess.Popen`` is given: environment, working directory, process group."""
        return {}

    @property
    def exit_status(self) -> int | None:
        """How it ended; None: it runs, or never did."""
        return None if self.process is None else self.process.poll()

    @property
    def is_alive(self) -> bool:
        """Whether its process runs."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start the process and return at once; see ``wait_ready``.

        Raises:
            LocalClusterError: it runs already, or the process could not be made.
        """
        if self.is_alive:
            raise self.error(f"member {self.name} runs already")
        try:
            with self.log_path.open("ab") as log:
                self.process = subprocess.Popen(
                    self.command(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    **self.spawn_options(),
                )
        except OSError as error:
            raise self.error(f"cannot start member {self.name}: {error.strerror or error}") from None

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until it serves: it knows a leader and answers reads.

        Arguments:
            timeout_s: how long.

        Raises:
            LocalClusterError: it ended instead, or took longer than that.
        """
        deadline = time.monotonic() + timeout_s
        while not is_healthy(self.endpoint):
            if self.process is None or _ended_within(self.process, POLL_S):
                raise self.error(f"member {self.name} did not start: {self.last_words()}")
            if time.monotonic() > deadline:
                raise self.error(
                    f"member {self.name} did not serve within {timeout_s:g} s:"
                    f" {self.last_words()} (log: {self.log_path})"
                )

    def kill(self) -> None:
        """End it as ``kill -9`` does: nothing is flushed, no signal handler runs. Harmless if it does not run."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()

    def last_words(self) -> str:
        """Return the last line of its log that says something, without the frame of a log record."""
        lines = log_tail(self.log_path).split("\n")
        return next((_message(line.strip()) for line in reversed(lines) if line.strip()), "it has said nothing")


def stop_all(members: Sequence[ServerProcess], *, timeout_s: float) -> None:
    """Ask every member to stop and wait; kill those that do not in time. Never leaves one running.

    Arguments:
        members: those that run are asked.
        timeout_s: for all of them.
    """
    running = [member.process for member in members if member.process is not None and member.is_alive]
    try:
        for process in running:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.0))
    finally:  # also when the user presses Ctrl-C again
        for process in running:
            process.kill()
            process.wait()


def initial_cluster(members: Sequence[ServerProcess]) -> str:
    """Return NAME=URL of every member, as ``--initial-cluster`` takes it."""
    return ",".join(f"{member.name}={member.peer_url}" for member in members)


def is_healthy(endpoint: str) -> bool:
    """Tell if the member behind ``host:port`` answers /health with 200: it has a leader and serves reads."""
    connection = http.client.HTTPConnection(endpoint, timeout=_HEALTH_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


@contextlib.contextmanager
def free_ports(count: int) -> Iterator[list[int]]:
    """Choose free ports, held until the block ends so that no two are equal."""
    chooser = random.SystemRandom()
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        while len(ports) < count:
            held = stack.enter_context(socket.socket())
            port = chooser.choice(_PORTS)
            with contextlib.suppress(OSError):
                held.bind((HOST, port))
                ports.append(port)
        yield ports


def log_tail(path: Path) -> str:
    """Return the end of a log, empty if there is none."""
    try:
        with path.open("rb") as log:
            log.seek(max(path.stat().st_size - _LOG_TAIL_BYTES, 0))
            return log.read().decode("utf-8", "replace")
    except OSError:
        return ""


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
