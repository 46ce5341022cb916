"""The members of the cluster under test, as processes: start, stop, kill -9, pause, restart, wipe.

One class serves raftkv and real etcd, because the flags have the same names. A member keeps its ports and its folder
over its lives; every start adds one to ``lives``. A member that is added later, even as a replacement, has a new
number, because observations are compared by number. Layout of a run's folder:

    <run>/m1/data/      the member's data directory
    <run>/m1/log        the output of all its lives

With ``Settings.network``, members and clients connect to relay ports of ``network.py``, not to the members' ports; with
``Settings.disks``, each member's data directory is a separate small disk (``disks.py``), visible only to that member.

Ports are below the ephemeral range, so that no outgoing connection can occupy the port of a member that is down. Where
util-linux has ``setpriv``, members die with the harness, even if it is killed.

This launcher is separate from ``raftkv.client.local``, because the test must not use code of the system under test.
"""

from __future__ import annotations

import fcntl
import functools
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from jepsen.faults.disks import DiskError, Disks
from jepsen.faults.network import Network, Target

ROOT = Path(__file__).resolve().parent.parent
MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_PORTS = range(10_000, 32_000)
_STOP_S = 10.0


class DbError(Exception):
    """A failure to bring a cluster up or down; the text is one line."""


def launch(command: list[str], environment: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a process that ends with this one, with further environment variables and a log file."""
    return subprocess.Popen(
        [*_die_with_parent(), *command],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, **environment},
    )


def programs() -> dict[str, list[str]]:
    """Return the command of each system under test."""
    etcd = Path(sys.executable).parent / "etcd"
    return {"raftkv": [sys.executable, "-m", "raftkv"], "etcd": [str(etcd)]}


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the members.

    Attributes:
        heartbeat_ms, election_ms: Raft's times.
        snapshot_count: entries between snapshots; small enough for snapshots to happen during a run.
        network: whether to put relays between members, and between them and clients (needed for network faults).
        others: further builds of the system, such as an earlier version; the lives of a member use the builds in turn.
        disks: whether to give each member a separate small disk (needed to fill it).
    """

    system: str = "raftkv"
    size: int = 3
    heartbeat_ms: int = 50
    election_ms: int = 500
    snapshot_count: int = 1000
    flags: tuple[str, ...] = ()
    network: bool = False
    disks: bool = False
    others: tuple[str, ...] = ()


@dataclass(slots=True)
class Member:
    """One member: its ports and folder, and its process while it runs.

    Attributes:
        program: words between the program and the flags, such as ``join URL``.
        initial_cluster: flags that identify its cluster; the same for all its lives.
    """

    number: int
    folder: Path
    client_port: int
    peer_port: int
    client_relay_port: int = 0
    peer_relay_port: int = 0
    program: tuple[str, ...] = ()
    initial_cluster: tuple[str, ...] = ()
    lives: int = 0
    paused: bool = False
    process: subprocess.Popen[bytes] | None = None
    log: IO[bytes] | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """The value of ``--name``."""
        return f"m{self.number}"

    @property
    def address(self) -> str:
        """The address for clients, through its relay port if there is one."""
        return f"127.0.0.1:{self.client_relay_port or self.client_port}"

    @property
    def direct_address(self) -> str:
        """The address at which it listens for clients; the harness uses it, because no fault cuts it."""
        return f"127.0.0.1:{self.client_port}"

    @property
    def peer_address(self) -> str:
        """The address for other members, through its relay port if there is one."""
        return f"127.0.0.1:{self.peer_relay_port or self.peer_port}"

    @property
    def up(self) -> bool:
        """Whether it was started and not killed or stopped by the harness (it may have died: see ``Cluster.died``)."""
        return self.process is not None


class Cluster:
    """The members of one cluster and their processes."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.settings = settings
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        each = 4 if settings.network else 2
        ports = free_ports(each * settings.size)
        self.members = [_member(folder, n, ports[each * (n - 1) : each * n]) for n in range(1, settings.size + 1)]
        self.removed: list[Member] = []
        self.network: Network | None = None
        self.disks = Disks() if settings.disks else None
        self.environment: Callable[[Member], Mapping[str, str]] = lambda member: {}
        """Returns further environment variables for each life of a member."""
        self.seed = 0
        """Seed of the random choices within faults."""
        self._numbers = settings.size
        peers = ",".join(f"{member.name}=http://{member.peer_address}" for member in self.members)
        for member in self.members:
            member.folder.mkdir(exist_ok=True)
            member.initial_cluster = ("--initial-cluster", peers, "--initial-cluster-state", "new")

    @property
    def quorum(self) -> int:
        """Number of members that is a majority."""
        return len(self.members) // 2 + 1

    async def open_network(self, seed: int) -> None:
        """Open the relay ports, if the settings require them."""
        if self.settings.network:
            targets = {port: target for member in self.members for port, target in _targets(member).items()}
            self.network = Network(targets, self._process_ids, seed)
            await self.network.open()

    async def new_member(self, lost: Member | None = None) -> Member:
        """Return a new member, which is neither in ``members`` nor started.

        Arguments:
            lost: member whose peer URL it takes over. Its client URL is new, so that clients cannot confuse the two.
        """
        self._numbers += 1
        member = _member(self.folder, self._numbers, free_ports(4 if self.settings.network else 2))
        if lost is not None:
            member.peer_port, member.peer_relay_port = lost.peer_port, lost.peer_relay_port
        member.folder.mkdir()
        if self.network is not None:
            await self.network.add(_targets(member))
        return member

    def let_go(self, member: Member) -> None:
        """Record that a member was removed from the cluster; its process may still run."""
        self.members.remove(member)
        self.removed.append(member)

    async def close_network(self) -> None:
        """Close the relay ports."""
        if self.network is not None:
            await self.network.close()

    def serving(self) -> list[Member]:
        """Return the members that are running and not paused."""
        return [member for member in self.members if member.up and not member.paused]

    def start(self, members: Iterable[Member], environment: Mapping[str, str] | None = None) -> None:
        """Start members, in the given order.

        Arguments:
            members: members to start.
            environment: further environment variables.
        """
        for member in members:
            if member.up:
                raise DbError(f"{member.name} runs already")
            member.lives += 1
            member.log = (member.folder / "log").open("ab")
            member.process = launch(
                self._command(member), {**self.environment(member), **(environment or {})}, member.log
            )

    def kill(self, members: Iterable[Member]) -> None:
        """Kill members with ``kill -9``, as simultaneously as possible; return when the processes are gone."""
        self._signal_and_reap(members, signal.SIGKILL)

    def stop(self, members: Iterable[Member]) -> None:
        """Send SIGTERM to members."""
        self._signal_and_reap(members, signal.SIGTERM)

    def pause(self, members: Iterable[Member]) -> None:
        """Stop members with SIGSTOP."""
        for member in members:
            if member.process is not None:
                member.process.send_signal(signal.SIGSTOP)
                member.paused = True

    def resume(self, members: Iterable[Member]) -> None:
        """Resume paused members with SIGCONT."""
        for member in members:
            if member.process is not None:
                member.process.send_signal(signal.SIGCONT)
            member.paused = False

    def wipe(self, member: Member) -> None:
        """Destroy the data of a member that is down; the checkers must notice this."""
        if member.up:
            raise DbError(f"{member.name} runs: kill it first")
        if self.disks is not None:
            self.disks.wipe(member.number)
        shutil.rmtree(member.folder / "data", ignore_errors=True)

    def died(self) -> list[tuple[Member, int]]:
        """Return the members that ended by themselves, with exit statuses; from now on they count as down."""
        ended = ((member, self.ended(member)) for member in self.members)
        return [(member, status) for member, status in ended if status is not None]

    def ended(self, member: Member) -> int | None:
        """Return the exit status of a member that ended by itself; from now on it counts as down."""
        status = member.process.poll() if member.process is not None else None
        if status is not None:
            self._forget(member)
        return status

    def close(self) -> None:
        """Kill all running members."""
        self.kill([*self.members, *self.removed])
        if self.disks is not None:
            self.disks.close()

    def _build(self, member: Member) -> list[str]:
        builds = [programs()[self.settings.system], *(shlex.split(other) for other in self.settings.others)]
        return builds[(member.number + member.lives) % len(builds)]

    def _on_its_disk(self, member: Member) -> list[str]:
        if self.disks is None:
            return []
        try:
            return self.disks.enter(member.number, member.folder / "data")
        except (DiskError, OSError) as error:
            raise DbError(str(error)) from None

    def _process_ids(self) -> dict[int, int]:
        return {member.number: member.process.pid for member in self.members if member.process is not None}

    def _signal_and_reap(self, members: Iterable[Member], number: signal.Signals) -> None:
        running = [(member, member.process) for member in members if member.process is not None]
        for _, process in running:
            process.send_signal(number)
        for member, process in running:
            if member.paused:
                process.send_signal(signal.SIGCONT)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self._forget(member)

    @staticmethod
    def _forget(member: Member) -> None:
        member.process, member.paused = None, False
        if member.log is not None:
            member.log.close()
            member.log = None

    def _command(self, member: Member) -> list[str]:
        client, peer = f"http://{member.direct_address}", f"http://127.0.0.1:{member.peer_port}"
        settings = self.settings
        return [
            *self._on_its_disk(member),
            *self._build(member),
            *member.program,
            *("--name", member.name),
            *("--data-dir", str(member.folder / "data")),
            *("--listen-client-urls", client, "--advertise-client-urls", f"http://{member.address}"),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", f"http://{member.peer_address}"),
            *member.initial_cluster,
            *("--initial-cluster-token", self.folder.name),
            *("--heartbeat-interval", str(settings.heartbeat_ms)),
            *("--election-timeout", str(settings.election_ms)),
            *("--snapshot-count", str(settings.snapshot_count)),
            *("--log-level", "warn"),
            *settings.flags,
        ]


def _member(folder: Path, number: int, ports: list[int]) -> Member:
    client_port, peer_port, *relay_ports = ports
    member = Member(number, folder / f"m{number}", client_port, peer_port)
    if relay_ports:
        member.client_relay_port, member.peer_relay_port = relay_ports
    return member


def _targets(member: Member) -> dict[int, Target]:
    return {
        member.client_relay_port: Target(member.number, member.client_port, False),
        member.peer_relay_port: Target(member.number, member.peer_port, True),
    }


_given_ports: set[int] = {22_379, 22_380}
"""Ports that must not be used (again); the first two are those of `make cluster`, which a test runs."""


@functools.cache
def _claims() -> int:
    """Open the file in which the processes of a machine reserve ports: each locks the byte with the port's number."""
    path = Path(tempfile.gettempdir()) / f"raftkv-test-ports-{os.getuid()}"
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _is_free(port: int) -> bool:
    """Reserve a port until this process ends; return False if another process has reserved it or listens on it.

    Servers set SO_REUSEADDR and may listen there; other searches for a port, such as ``raftkv.local``, pass it by.
    """
    with socket.socket() as held:
        try:
            fcntl.lockf(_claims(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
            held.bind(("127.0.0.1", port))
        except OSError:
            return False
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.detach()
    return True


def free_port() -> int:
    """Return a free loopback port below the kernel's range of outgoing ports.

    A port of the outgoing range could be taken between this call and the server's bind, or while a killed member is
    down. The port is also reserved against other tests and harnesses until this process ends.
    """
    chooser = random.SystemRandom()
    for _ in range(1000):
        port = chooser.choice(_PORTS)
        if port not in _given_ports and _is_free(port):
            _given_ports.add(port)
            return port
    raise DbError("no free ports")


def free_ports(count: int) -> list[int]:
    """Return ``count`` free ports."""
    return [free_port() for _ in range(count)]


def filesystem_of(path: Path) -> str:
    """Return the type of the filesystem that holds a path, such as ``ext4``."""
    place = os.path.realpath(path)
    best, kind = "", "unknown"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        mount = left.split()[4].replace("\\040", " ")
        inside = place == mount or place.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, right.split()[0]
    return kind


def require_disk(path: Path) -> None:
    """Refuse to test durability on a file system in memory.

    Raises:
        DbError: the path is on such a file system.
    """
    kind = filesystem_of(path)
    if kind in MEMORY_FILESYSTEMS:
        raise DbError(f"{path} is on {kind}: durability cannot be tested in memory")


def _die_with_parent() -> list[str]:
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []
