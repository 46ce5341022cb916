"""``raftkv.local``: a throwaway cluster on this machine, for a program or a test; deleted at the end of the block.

    with raftkv.local() as cluster, cluster.connect() as kv:
        kv.put("greeting", b"hello")

    with raftkv.local(size=3) as cluster:
        cluster.members[0].kill()

Manages a temporary directory, free loopback ports, and the member processes until they are gone. It is a real cluster:
the same server, the same log on disk, the same fsync; only its data is deleted.

Invariants:

1. Nothing is left behind, however the program ends: the members and their data are removed at the end of the block,
   after an exception in it, at the exit of the interpreter, and after ``kill -9``, by the guard (see ``guard``).
2. Only the process that created the cluster ends it: a forked child that leaves the block, or exits, changes nothing.
3. A port that was taken between choosing and using it causes another attempt, not an error.

Not here: persistent clusters (``raftkv cluster``), TLS, users.
"""

from __future__ import annotations

import atexit
import contextlib
import http.client
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from raftkv.client import guard
from raftkv.errors import ConfigError, LeaseNotFoundError, RaftKVError

if TYPE_CHECKING:
    from raftkv.client.sync.library import Client

# -- process --------------------------------------------------------------------------------------------------------
#
# One server process on this machine: its command line, its start, its readiness, its end, its log.
#
# The common part of all launchers of local members: ``raftkv.local``, ``raftkv cluster``, the tests, the benchmarks.
# Subclasses define the differences: the program, the token, the environment, the process group.
#
#     member = ServerProcess("node1", directory, 2379, 2380, initial_cluster="node1=http://127.0.0.1:2380")
#     member.start()
#     member.wait_ready()
#     member.kill()
#
# There are no fixed sleeps: readiness is polled, and the poll waits on the process, whose exit ends the wait at once.
#
# Not here: the order in which members start, and the cleanup of directories; both belong to the owners of clusters.
# ``jepsen`` has a separate launcher, because it may not import the system under test.

HOST: Final = "127.0.0.1"
READY_TIMEOUT_S: Final = 90.0
"""Where dozens of processes share a processor, a start takes half a minute. A member that ends is reported at once."""
POLL_S: Final = 0.01
_PORTS: Final = range(10_000, 32_000)
"""Below the kernel's range of ports for outgoing connections, which may be taken at any moment."""
_PORT_ATTEMPTS: Final = 100
_HEALTH_TIMEOUT_S: Final = 10.0
_LOG_TAIL_BYTES: Final = 4096


class LocalClusterError(RaftKVError):
    """A member of a local cluster could not be started, or died; one line names it and quotes its last log line."""


@dataclass
class ServerProcess:
    """One member of a local cluster.

    Attributes:
        name: name of the member.
        directory: directory of its data and its log.
        client_port, peer_port: ports on the loopback interface.
        initial_cluster: NAME=URL of every member.
        flags: further flags, as on the command line of ``raftkv``.
        process: the process, from its start until its end is noticed.
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
        """URL for clients."""
        return f"http://{self.endpoint}"

    @property
    def peer_url(self) -> str:
        """URL for the other members."""
        return f"http://{HOST}:{self.peer_port}"

    @property
    def data_dir(self) -> Path:
        """Directory of its data."""
        return self.directory / self.name

    @property
    def log_path(self) -> Path:
        """File with the output of all its processes."""
        return self.directory / f"{self.name}.log"

    @property
    def token(self) -> str:
        """The cluster token."""
        return self.directory.name

    def command(self) -> list[str]:
        """Return the command line. The flags are etcd's, so it works with either program."""
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
        """Return further arguments of ``subprocess.Popen``: environment, working directory, process group."""
        return {}

    @property
    def exit_status(self) -> int | None:
        """Exit status of the process; None: it is running, or was never started."""
        return None if self.process is None else self.process.poll()

    @property
    def is_alive(self) -> bool:
        """Whether the process is running."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start the process and return at once; see ``wait_ready``.

        Raises:
            LocalClusterError: it is already running, or the process could not be started.
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
        """Wait until the member serves: it knows a leader and answers reads.

        Arguments:
            timeout_s: time limit.

        Raises:
            LocalClusterError: the process ended, or the time limit was exceeded.
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
        """Kill the process as ``kill -9`` does: no flush, no signal handlers. Safe if it is not running."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()

    def last_words(self) -> str:
        """Return the last meaningful line of its log, without the frame of a log record."""
        lines = log_tail(self.log_path).split("\n")
        return next((_message(line.strip()) for line in reversed(lines) if line.strip()), "it has said nothing")


def stop_all(members: Sequence[ServerProcess], *, timeout_s: float) -> None:
    """Ask every member to stop and wait; kill those that do not stop in time. Never leaves a member running.

    Arguments:
        members: members; those that are not running are skipped.
        timeout_s: time limit for all of them together.
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
    """Return whether the member at ``host:port`` answers /health with 200: it has a leader and serves reads."""
    connection = http.client.HTTPConnection(endpoint, timeout=_HEALTH_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def hold_port(host: str = HOST) -> socket.socket:
    """Return a socket that is bound to a free port: a server can listen there, and a search for a port passes it by.

    Servers set SO_REUSEADDR, as asyncio and Go do. A search for a free port does not, so that the kernel refuses it.

    Raises:
        ConfigError: no port is free.
    """
    chooser = random.SystemRandom()
    for _ in range(_PORT_ATTEMPTS):
        one = socket.socket()
        try:
            one.bind((host, chooser.choice(_PORTS)))
        except OSError:
            one.close()
        else:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            return one
    raise ConfigError(f"no free port between {_PORTS.start} and {_PORTS.stop} was found in {_PORT_ATTEMPTS} attempts")


def free_port() -> int:
    """Return a port on which no server of this machine listens. Raises ConfigError."""
    with hold_port("") as one:
        return int(one.getsockname()[1])


def log_tail(path: Path) -> str:
    """Return the end of a log; empty if the file does not exist."""
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


# -- member ---------------------------------------------------------------------------------------------------------
#
# One member of a throwaway cluster, for tests of how a program behaves when a member is killed or paused.
#
# Members run in the process group of the cluster's guard (see ``guard``), so a Ctrl-C in the terminal does not
# reach them.

_PACKAGE_ROOT: Final = str(Path(__file__).resolve().parents[3])

__all__ = ["LocalClusterError", "LocalMember"]


@dataclass
class LocalMember(ServerProcess):
    """One member; ``endpoint`` is its address for clients, ``log_path`` its log."""

    group: int = 0

    def spawn_options(self) -> Mapping[str, Any]:
        """Implement ``ServerProcess.spawn_options``: use the process group of the guard."""
        return {"cwd": self.directory, "env": _environment(), "process_group": self.group}

    is_running = ServerProcess.is_alive
    """Whether the process is running."""

    def stop(self) -> None:
        """Ask the member to stop, and wait until it has stopped; a paused member is resumed first."""
        process, self.process = self.process, None
        if process is not None:
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
            process.wait()

    def pause(self) -> None:
        """Freeze it (SIGSTOP): its connections stay open, and it does not answer.

        Raises:
            LocalClusterError: it is not running.
        """
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume a paused member.

        Raises:
            LocalClusterError: it is not running.
        """
        self._signal(signal.SIGCONT)

    def restart(self, *, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Stop the member if it is running, start it on the same data and ports, and wait until it serves.

        A member of a cluster of three serves once it knows a leader, so when a majority is down, restart it with
        ``start``.

        Raises:
            LocalClusterError: it did not start.
        """
        self.kill()
        self.start()
        self.wait_ready(timeout_s=timeout_s)

    def _signal(self, number: signal.Signals) -> None:
        if self.process is None or not self.is_alive:
            raise LocalClusterError(f"member {self.name} does not run")
        self.process.send_signal(number)


def _environment() -> dict[str, str]:
    """Return the environment without ETCD_*, which would configure a member, and with this raftkv first in the path."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
    path = kept.get("PYTHONPATH", "")
    kept["PYTHONPATH"] = f"{_PACKAGE_ROOT}{os.pathsep}{path}" if path else _PACKAGE_ROOT
    kept.pop("PYTHONOPTIMIZE", None)
    return kept


SIZES: Final = (1, 3, 5, 7)
_ATTEMPTS: Final = 3
_PORT_TAKEN: Final = "address already in use"


def local(
    size: int = 1,
    *,
    fsync: bool = True,
    flags: Sequence[str] = (),
    directory: str | os.PathLike[str] | None = None,
    timeout_s: float = READY_TIMEOUT_S,
) -> LocalCluster:
    """Create a throwaway cluster, started by ``with`` or by ``start()``.

    Arguments:
        size: number of members: 1, 3, 5 or 7.
        fsync: whether to sync to disk like a real cluster; False is faster on slow disks but loses data on a power cut.
        flags: further flags for every member, as on the command line of ``raftkv``.
        directory: parent of the temporary directory; None: the system's directory for temporary files.
        timeout_s: time limit until the cluster is ready.

    Raises:
        ConfigError: an invalid size.
    """
    if size not in SIZES:
        raise ConfigError(f"a local cluster has 1, 3, 5 or 7 members, not {size!r}")
    given = (*flags, *(() if fsync else ("--unsafe-no-fsync",)))
    return LocalCluster(size, given, None if directory is None else Path(directory), timeout_s)


class LocalCluster:
    """A cluster of processes on this machine; created by ``raftkv.local``.

    Attributes:
        members: the members; use ``kill``, ``pause`` and ``restart`` to test how a program reacts.
        directory: temporary directory with their data and logs, while the cluster is running.
    """

    def __init__(self, size: int, flags: tuple[str, ...], base: Path | None, timeout_s: float) -> None:
        self.members: list[LocalMember] = []
        self.directory: Path | None = None
        self._size = size
        self._flags = flags
        self._base = base
        self._timeout_s = timeout_s
        self._owner = 0
        self._guard: subprocess.Popen[bytes] | None = None
        self._held: list[socket.socket] = []
        self._clients: weakref.WeakSet[Client] = weakref.WeakSet()

    def __repr__(self) -> str:
        running = ",".join(self.endpoints) if self.members else "not running"
        return f"<LocalCluster of {self._size}: {running}>"

    @property
    def endpoints(self) -> list[str]:
        """``host:port`` of every member, as ``raftkv.connect`` takes them."""
        return [member.endpoint for member in self.members]

    def start(self) -> LocalCluster:
        """Start the members and wait until all serve; not needed with ``with``.

        Raises:
            LocalClusterError: it is already running, or a member did not start.
        """
        if self._owner:
            raise LocalClusterError("the local cluster runs already")
        _running.add(self)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._start_members()
            except LocalClusterError as error:
                self.close()
                if _PORT_TAKEN not in str(error).lower() or attempt == _ATTEMPTS:
                    raise
            except BaseException:
                self.close()
                raise
            else:
                break
        return self

    def connect(self, **options: Any) -> Client:
        """Return a client, which is closed with the cluster; ``options`` as for ``raftkv.connect``.

        Users and certificates in the environment are ignored, because they are meant for another cluster.
        """
        from raftkv.client.sync.library import connect

        options.setdefault("user", "")
        if not options.keys() & {"ca_file", "cert_file", "key_file"}:
            options.setdefault("tls", False)
        client = connect(self.endpoints, **options)
        self._clients.add(client)
        return client

    def close_clients(self) -> None:
        """Close all clients that ``connect`` has returned."""
        clients, self._clients = list(self._clients), weakref.WeakSet()
        for client in clients:
            client.close()

    def reset(self) -> None:
        """Restore the initial state except for the revision: all members run, and all keys and leases are deleted.

        Raises:
            LocalClusterError: a member did not start again.
            StatusError: the cluster did not delete the keys and leases.
        """
        for member in self.members:
            if member.is_running:
                member.resume()
            else:
                member.start()
        for member in self.members:
            member.wait_ready(timeout_s=self._timeout_s)
        with self.connect(timeout_s=self._timeout_s) as kv:
            for lease in kv.leases():
                with contextlib.suppress(LeaseNotFoundError):
                    kv.revoke(lease)
            kv.delete("", prefix=True)

    def close(self) -> None:
        """Stop all members and remove their data. Does nothing in a forked child: they belong to the parent."""
        if self._owner != os.getpid():
            return
        self.close_clients()
        for member in self.members:
            member.kill()
        for one in self._held:
            one.close()
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)
        if self._guard is not None:
            self._guard.kill()
            self._guard.communicate()
        self._guard, self.directory, self._owner = None, None, 0
        _running.discard(self)

    def __enter__(self) -> LocalCluster:
        return self if self._owner else self.start()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start_members(self) -> None:
        self._owner = os.getpid()
        try:
            self.directory = Path(tempfile.mkdtemp(prefix="raftkv-", dir=self._base)).resolve()
        except OSError as error:
            raise LocalClusterError(f"cannot make a temporary directory: {error.strerror} ({error.filename})") from None
        try:
            self._guard = start_guard(str(self.directory))
        except OSError as error:
            raise LocalClusterError(f"cannot start {sys.executable}: {error.strerror}") from None
        self.members = self._make_members(self.directory, self._guard.pid)
        for member in self.members:
            member.start()
        for member in self.members:
            member.wait_ready(timeout_s=self._timeout_s)

    def _make_members(self, directory: Path, group: int) -> list[LocalMember]:
        self._held = [hold_port() for _ in range(2 * self._size)]
        ports = [one.getsockname()[1] for one in self._held]
        members = [
            LocalMember(f"node{number}", directory, client, peer, flags=self._flags, group=group)
            for number, (client, peer) in enumerate(zip(ports[::2], ports[1::2], strict=True), start=1)
        ]
        for member in members:
            member.initial_cluster = initial_cluster(members)
        return members

    def _forget_guard(self) -> None:
        """Close the pipe in a forked child; otherwise the guard would wait for the child's end too."""
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()


def start_guard(directory: str, mark: str = "") -> subprocess.Popen[bytes]:
    """Start a process that removes processes and files after the end of this one; arguments as for ``guard.main``."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(guard.__file__).resolve()), directory, mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
        process_group=0,
    )


_running: set[LocalCluster] = set()
"""Strong references: a cluster without other references runs until the program ends, and ends with it."""


@atexit.register
def _close_all() -> None:
    for cluster in list(_running):
        cluster.close()


def _after_fork_in_child() -> None:
    for cluster in list(_running):
        cluster._forget_guard()


os.register_at_fork(after_in_child=_after_fork_in_child)
