"""The members of a local cluster as child processes.

Owns their ports, their directory and who founded the cluster in it. A child has a session of its own, so that a Ctrl-C
in the terminal reaches this program alone, which then stops the children.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from raftkv.cli.exits import CommandError
from raftkv.client.local.process import HOST, LocalClusterError, ServerProcess, initial_cluster, stop_all
from raftkv.offline.directory import obstacle

FIRST_CLIENT_PORT = 2379
FIRST_PEER_PORT = 2380
PORT_STEP = 10_000
SIZE_MAX = 6
STOP_TIMEOUT_S = 10.0
FOUNDERS = "members"
"""File that says which members the cluster below a directory has: names and peer URLs."""


def default_ports(first: int, size: int) -> list[int]:
    """Return the ports that etcd's own local cluster uses: 2379, 22379, 32379, ...

    Arguments:
        first: port of the first member.
        size: number of members.
    """
    return [first + (number + 1) * PORT_STEP if number else first for number in range(size)]


class Member(ServerProcess):
    """One member, in a session of its own: a Ctrl-C in the terminal reaches this program alone."""

    token = "raftkv-local"

    def spawn_options(self) -> Mapping[str, Any]:
        """Implement ``ServerProcess.spawn_options``."""
        return {"start_new_session": True}


@contextlib.contextmanager
def claimed(ports: Sequence[int]) -> Iterator[None]:
    """Keep other ``raftkv cluster`` from ports, also before the members listen: their answers would pass for ours.

    Arguments:
        ports: of all members.

    Raises:
        CommandError: another one has claimed a port.
    """
    with contextlib.ExitStack() as stack:
        for port in set(ports):
            # A name of the kernel's, which goes with this process, and is of its network as ports are.
            claim = stack.enter_context(socket.socket(socket.AF_UNIX))
            try:
                claim.bind(f"\0raftkv-cluster/{port}")
            except OSError:
                raise CommandError(f"cannot listen on {HOST}:{port}: another `raftkv cluster` does") from None
        yield


def make_members(directory: Path, client_ports: Sequence[int], peer_ports: Sequence[int]) -> list[Member]:
    """Make members named node1, node2, ... with their data below a directory.

    Arguments:
        directory: for data and logs.
        client_ports, peer_ports: one of each for a member.

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
        why = obstacle(str(directory)) or f"cannot use directory {directory}: {error.strerror}"
        raise CommandError(why) from None
    members = [
        Member(f"node{number}", directory, client, peer)
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


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise CommandError(f"cannot listen on {HOST}:{port}: {error.strerror}") from None


def start_all(members: Sequence[Member], flags: Sequence[str]) -> None:
    """Start every member; if one cannot be started, stop the others.

    Arguments:
        members: whom.
        flags: more of them, for every member.

    Raises:
        CommandError: a member cannot be started.
    """
    try:
        for member in members:
            member.initial_cluster, member.flags = initial_cluster(members), flags
            member.start()
    except LocalClusterError as error:
        stop_all(members, timeout_s=STOP_TIMEOUT_S)
        raise CommandError(str(error)) from None
