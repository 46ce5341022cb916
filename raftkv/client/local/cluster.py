"""``raftkv.local``: a throwaway cluster for a program or a test, on this machine, gone when the block ends.

    with raftkv.local() as cluster, cluster.connect() as kv:
        kv.put("greeting", b"hello")

    with raftkv.local(size=3) as cluster:
        cluster.members[0].kill()

Owns a temporary directory, free loopback ports, the member processes and their end. It is a real cluster: the same
server, the same log on disk, the same fsync; only its data is not kept.

Invariants:

1. Nothing is left behind, however the program goes: at the end of the block and at an exception in it, at the end of
   the interpreter, and after ``kill -9`` by the guard (see ``local.guard``).
2. Only the process that made the cluster ends it: a forked child that leaves the block, or exits, touches nothing.
3. A port that was taken between choosing and using it costs another try, not an error.

Leaves out: clusters that are kept (``raftkv cluster``), TLS, users.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from raftkv.client.local.process import READY_TIMEOUT_S, LocalClusterError, ServerProcess, free_ports, initial_cluster
from raftkv.errors import ConfigError, LeaseNotFoundError

if TYPE_CHECKING:
    from raftkv.client.sync.library import Client

# -- member ---------------------------------------------------------------------------------------------------------
#
# One member of a throwaway cluster, for those who want to see what a program does when it is killed or paused.
#
# Members run in the process group of the cluster's guard (see ``local.guard``), so a Ctrl-C in the terminal does not
# reach them.

_PACKAGE_ROOT: Final = str(Path(__file__).resolve().parents[3])

__all__ = ["LocalClusterError", "LocalMember"]


@dataclass
class LocalMember(ServerProcess):
    """One member. ``endpoint`` is where clients reach it, ``log_path`` where its log is."""

    group: int = 0

    def spawn_options(self) -> Mapping[str, Any]:
        """Implement ``ServerProcess.spawn_options``: the group is the guard's."""
        return {"cwd": self.directory, "env": _environment(), "process_group": self.group}

    @property
    def is_running(self) -> bool:
        """Whether its process is alive."""
        return self.is_alive

    def stop(self) -> None:
        """Ask it to stop and wait until it has; a member that is paused is woken first."""
        process, self.process = self.process, None
        if process is not None:
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
            process.wait()

    def pause(self) -> None:
        """Freeze it (SIGSTOP): its connections stay open, and it does not answer.

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

    def _signal(self, number: signal.Signals) -> None:
        if self.process is None or not self.is_alive:
            raise LocalClusterError(f"member {self.name} does not run")
        self.process.send_signal(number)


def _environment() -> dict[str, str]:
    """Return the caller's, without the settings that would reach a member (ETCD_*), and with this very raftkv first."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
    path = kept.get("PYTHONPATH", "")
    kept["PYTHONPATH"] = f"{_PACKAGE_ROOT}{os.pathsep}{path}" if path else _PACKAGE_ROOT
    kept.pop("PYTHONOPTIMIZE", None)
    return kept


SIZES: Final = (1, 3, 5, 7)
_ATTEMPTS: Final = 3
_PORT_TAKEN: Final = "address already in use"
_GUARD: Final = str(Path(__file__).with_name("guard.py"))


def local(
    size: int = 1,
    *,
    fsync: bool = True,
    flags: Sequence[str] = (),
    directory: str | os.PathLike[str] | None = None,
    timeout_s: float = READY_TIMEOUT_S,
) -> LocalCluster:
    """Make a throwaway cluster; started by ``with`` or by ``start()``.

    Arguments:
        size: number of members: 1, 3, 5 or 7.
        fsync: wait for the disk as a real cluster does; False is faster on slow disks and loses data on a power cut.
        flags: more flags for every member, as on the command line of ``raftkv``.
        directory: where to make the temporary directory; None: where the system has its temporary files.
        timeout_s: time for the cluster to become ready.

    Raises:
        ConfigError: a size that is none of these.
    """
    if size not in SIZES:
        raise ConfigError(f"a local cluster has 1, 3, 5 or 7 members, not {size!r}")
    given = (*flags, *(() if fsync else ("--unsafe-no-fsync",)))
    return LocalCluster(size, given, None if directory is None else Path(directory), timeout_s)


class LocalCluster:
    """A cluster of processes of this machine; made by ``raftkv.local``.

    Attributes:
        members: the members; ``kill``, ``pause``, ``restart`` them to see what a program does then.
        directory: the temporary directory with their data and logs, while the cluster runs.
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
            LocalClusterError: it runs already, or a member did not start.
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
        """Connect a client, which is closed with the cluster; ``options`` as for ``raftkv.connect``.

        What the environment says of users and certificates is about another cluster.
        """
        from raftkv.client.sync.library import connect

        options.setdefault("user", "")
        if not options.keys() & {"ca_file", "cert_file", "key_file"}:
            options.setdefault("tls", False)
        client = connect(self.endpoints, **options)
        self._clients.add(client)
        return client

    def close_clients(self) -> None:
        """Close the clients that ``connect`` gave out."""
        clients, self._clients = list(self._clients), weakref.WeakSet()
        for client in clients:
            client.close()

    def reset(self) -> None:
        """Make it as good as new, but for the revision: all members run, and no keys and no leases are left.

        Raises:
            LocalClusterError: a member did not start again.
            StatusError: the cluster did not do it.
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
        """End all members and remove their data. In a forked child: nothing, they are the parent's."""
        if self._owner != os.getpid():
            return
        self.close_clients()
        for member in self.members:
            member.kill()
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)
        if self._guard is not None:
            self._guard.kill()
            self._guard.communicate()
        self._guard, self.directory, self._owner = None, None, 0
        _running.discard(self)

    def __enter__(self) -> LocalCluster:
        return self if self._owner else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start_members(self) -> None:
        self._owner = os.getpid()
        try:
            self.directory = Path(tempfile.mkdtemp(prefix="raftkv-", dir=self._base)).resolve()
        except OSError as error:
            raise LocalClusterError(f"cannot make a temporary directory: {error.strerror} ({error.filename})") from None
        self._guard = _start_guard(self.directory)
        self.members = self._make_members(self.directory, self._guard.pid)
        for member in self.members:
            member.start()
        for member in self.members:
            member.wait_ready(timeout_s=self._timeout_s)

    def _make_members(self, directory: Path, group: int) -> list[LocalMember]:
        with free_ports(2 * self._size) as ports:
            pairs = zip(ports[::2], ports[1::2], strict=True)
            members = [
                LocalMember(f"node{number}", directory, client, peer, flags=self._flags, group=group)
                for number, (client, peer) in enumerate(pairs, start=1)
            ]
        for member in members:
            member.initial_cluster = initial_cluster(members)
        return members

    def _forget_guard(self) -> None:
        """Let go of the pipe in a forked child, or the guard would wait for the child's end too."""
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()


def _start_guard(directory: Path) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", _GUARD, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            process_group=0,
        )
    except OSError as error:
        raise LocalClusterError(f"cannot start {sys.executable}: {error.strerror}") from None


_running: set[LocalCluster] = set()
"""Strongly held: a cluster that its program lost sight of runs until the program ends, and ends with it."""


@atexit.register
def _close_all() -> None:
    for cluster in list(_running):
        cluster.close()


def _after_fork_in_child() -> None:
    for cluster in list(_running):
        cluster._forget_guard()


os.register_at_fork(after_in_child=_after_fork_in_child)
