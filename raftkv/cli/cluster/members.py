"""The members of a local cluster as child processes.

Owns their command lines, ports, log files and their end. A child has its own process group, so that a Ctrl-C in the
terminal reaches this program alone, which then stops the children in order: asked first, killed if they do not listen.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from raftkv.cli.exits import CommandError

HOST = "127.0.0.1"
FIRST_CLIENT_PORT = 2379
FIRST_PEER_PORT = 2380
PORT_STEP = 10_000
SIZE_MAX = 6
STOP_TIMEOUT_S = 10.0
FOUNDERS = "members"
"""File that says which members the cluster below a directory has: names and peer URLs."""
_LOG_TAIL_BYTES = 4096


def default_ports(first: int, size: int) -> list[int]:
    """The ports that etcd's own local cluster uses: 2379, 22379, 32379, ..."""
    return [first + (number + 1) * PORT_STEP if number else first for number in range(size)]


@dataclass
class Member:
    """One member: where it is, how it is started, and its process once it is."""

    name: str
    client_port: int
    peer_port: int
    directory: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def client_url(self) -> str:
        """Where clients reach it."""
        return f"http://{HOST}:{self.client_port}"

    @property
    def peer_url(self) -> str:
        """Where the other members reach it."""
        return f"http://{HOST}:{self.peer_port}"

    @property
    def log_path(self) -> Path:
        """What it prints."""
        return self.directory.with_suffix(".log")

    def command(self, initial_cluster: str, flags: Sequence[str]) -> list[str]:
        """Its command line."""
        return [
            *(sys.executable, "-m", "raftkv", "serve"),
            f"--name={self.name}",
            f"--data-dir={self.directory}",
            f"--listen-client-urls={self.client_url}",
            f"--advertise-client-urls={self.client_url}",
            f"--listen-peer-urls={self.peer_url}",
            f"--initial-advertise-peer-urls={self.peer_url}",
            f"--initial-cluster={initial_cluster}",
            "--initial-cluster-token=raftkv-local",
            *flags,
        ]

    def start(self, initial_cluster: str, flags: Sequence[str]) -> None:
        """Start it; its output goes to its log file."""
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(initial_cluster, flags),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def exit_status(self) -> int | None:
        """How it ended; None: it runs."""
        return None if self.process is None else self.process.poll()

    def last_words(self) -> str:
        """The last line of its log."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(self.log_path.stat().st_size - _LOG_TAIL_BYTES, 0))
                lines = log.read().decode("utf-8", "replace").split("\n")
        except OSError:
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


def make_members(directory: Path, client_ports: Sequence[int], peer_ports: Sequence[int]) -> list[Member]:
    """Members named node1, node2, ... with their data below a directory.

    Raises:
        CommandError: the directory cannot be made or holds another cluster, a port is given twice or is taken.
    """
    ports = [*client_ports, *peer_ports]
    if len(set(ports)) != len(ports) or not all(0 < port < 65536 for port in ports):
        raise CommandError(f"ports must be different and between 1 and 65535: {', '.join(map(str, ports))}")
    for port in ports:
        _check_free(port)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"cannot use directory {directory}: {error.strerror}") from None
    members = [
        Member(f"node{number}", client, peer, directory / f"node{number}")
        for number, (client, peer) in enumerate(zip(client_ports, peer_ports, strict=True), start=1)
    ]
    _check_founders(directory, members)
    return members


def _check_founders(directory: Path, members: Sequence[Member]) -> None:
    """Refuse data of another cluster: its members would wait for each other for ever, without a word."""
    note = directory / FOUNDERS
    wanted = initial_cluster(members)
    try:
        known = note.read_text(encoding="utf-8").strip() if note.exists() else ""
        there = sorted(path.parent.parent.name for path in directory.glob("node*/member/wal"))
        if not there:
            note.write_text(f"{wanted}\n", encoding="utf-8")
            return
    except OSError as error:
        raise CommandError(f"cannot use directory {directory}: {error.strerror}") from None
    remedy = f"or give another --data-dir, or remove {directory} with all of its data"
    size = len(known.split(",")) if known else len(there)
    if size != len(members):
        raise CommandError(
            f"{directory} holds a cluster of {size} members, not {len(members)}: give --size {size}, {remedy}"
        )
    if known and known != wanted:
        ports = ",".join(url.rpartition(":")[2] for url in known.split(","))
        raise CommandError(f"{directory} holds a cluster with --peer-ports {ports}: give these, {remedy}")


def initial_cluster(members: Sequence[Member]) -> str:
    """NAME=URL of every member, as ``--initial-cluster`` takes it."""
    return ",".join(f"{member.name}={member.peer_url}" for member in members)


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise CommandError(f"cannot listen on {HOST}:{port}: {error.strerror}") from None


def start_all(members: Sequence[Member], flags: Sequence[str]) -> None:
    """Start every member; if one cannot be started, stop the others.

    Raises:
        CommandError: a member cannot be started.
    """
    founders = initial_cluster(members)
    try:
        for member in members:
            member.start(founders, flags)
    except OSError as error:
        stop_all(members)
        raise CommandError(f"cannot start {member.name}: {error.strerror}") from None


def stop_all(members: Sequence[Member], *, timeout_s: float = STOP_TIMEOUT_S) -> None:
    """Ask every member to stop and wait; kill those that do not in time. Never leaves one running."""
    running = [member.process for member in members if member.process is not None and member.exit_status is None]
    try:
        for process in running:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        for process in running:
            try:
                process.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                process.kill()
    finally:  # also when the user presses Ctrl-C again
        for process in running:
            process.kill()
            process.wait()
