"""``raftkv cluster``: several members on this machine, started with one command, in one terminal.

Manages the member processes (ports and directory), asks each member for its status twice a second, and shows the
answers: as a live table on a terminal, otherwise as lines about changes. A member that ends is shown as exited and is
not restarted automatically, so that a user can kill one and observe the others; SIGUSR1 starts it again. Ctrl-C, or any
other signal that this program can catch, ends all members. A directory belongs to one cluster, which it records.

    raftkv cluster --size 3 --data-dir cluster-data -- --snapshot-count=1000

Not here: clusters in a temporary directory (``raftkv.local``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raftkv.cli import daemon, pflag
from raftkv.cli.ctl.top import Row, Sample, make_rows
from raftkv.cli.pflag import INT, LIST, Flag
from raftkv.cli.printer import human_size
from raftkv.cli.program import BAD_FLAGS, ERROR, STOPPING, SUCCESS, CommandError, on_signals
from raftkv.cli.table import draw
from raftkv.client import Client, ClientOptions
from raftkv.client.local import HOST, LocalClusterError, ServerProcess, initial_cluster, stop_all
from raftkv.client.rpc import methods
from raftkv.errors import StatusError
from raftkv.offline.directory import obstacle
from raftkv.pb import rpc_pb2

if TYPE_CHECKING:
    from rich.table import Table


# -- display ---------------------------------------------------------------------------------------------------------


SERVING = ("leader", "follower", "learner")
"""Roles of members that answer and know a leader; the others are candidate, starting, silent and exited."""


def make_table(rows: Sequence[Row], pids: Mapping[str, int]) -> Table:
    """Return the live table; its caption gives the dashboard's address, and how to restart an ended member.

    The table fits 80 columns, even with the longest role and process id.

    Arguments:
        rows: current rows.
        pids: process ids of the running members, by name.
    """
    from rich.text import Text

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.0f}"

    columns: list[tuple[str, Callable[[Row], str]]] = [
        ("member", lambda row: row.name),
        ("role", lambda row: row.role),
        ("pid", lambda row: number(pids.get(row.name))),
        ("term", lambda row: number(row.term)),
        ("revision", lambda row: number(row.revision)),
        ("db size", lambda row: "-" if row.db_size_bytes is None else human_size(row.db_size_bytes)),
        ("writes/s", lambda row: number(row.writes_per_s)),
        ("address", lambda row: row.endpoint.removeprefix("http://")),
    ]
    url = dashboard(rows)
    lines = [f"dashboard: {url}   Ctrl-C stops all members" if url else "Ctrl-C stops all members"]
    lines += [f"{row.name}: {row.error}; start it again: {_REVIVE}" for row in rows if row.role == "exited"]
    look = {"title": "raftkv cluster", "caption": Text("\n".join(lines)), "box": None, "padding": (0, 1)}
    return draw(columns, rows, ("member", "role", "address"), pad_edge=False, **look)


_REVIVE = f"kill -USR1 {os.getpid()}"
"""The command that makes this program restart the members that have ended."""


def dashboard(rows: Sequence[Row]) -> str:
    """Return the address of the dashboard, at the first member that serves; empty if none does.

    Arguments:
        rows: current rows.
    """
    return next((f"{row.endpoint}/ui/" for row in rows if row.role in SERVING), "")


def news(before: Sequence[Row], after: Sequence[Row]) -> list[str]:
    """Return lines about the changes between two moments.

    Arguments:
        before, after: the rows of the two moments.
    """
    old = {row.name: row for row in before}
    lines = []
    for row in after:
        previous = old.get(row.name)
        if previous is not None and (previous.role, previous.term) == (row.role, row.term):
            continue
        if row.role == "exited":
            lines.append(f"{row.name}: {row.error} (start it again: {_REVIVE})")
        elif row.role in SERVING:
            lines.append(f"{row.name}: {row.role} in term {row.term} at {row.endpoint}")
        elif previous is not None:
            lines.append(f"{row.name}: {row.role}")
    was_serving = bool(before) and all(row.role in SERVING for row in before)
    if not was_serving and after and all(row.role in SERVING for row in after):
        lines.append(f"dashboard: {dashboard(after)}")
        lines.append(f"ready: {_ctl()} --endpoints {','.join(row.endpoint for row in after)} endpoint status")
    return lines


def _ctl() -> str:
    """Return how to call the ``raftkvctl`` of this installation from the working directory."""
    own = Path(sys.executable).with_name("raftkvctl")
    if not own.exists() or shutil.which("raftkvctl") == str(own):
        return "raftkvctl"
    return shlex.quote(os.path.relpath(own) if own.is_relative_to(Path.cwd()) else str(own))


# -- the member processes --------------------------------------------------------------------------------------------

FIRST_CLIENT_PORT = 2379
FIRST_PEER_PORT = 2380
PORT_STEP = 10_000
SIZE_MAX = 6
STOP_TIMEOUT_S = 10.0
FOUNDERS = "members"
"""File that records the members of the cluster in a directory: names and peer URLs."""


class Member(ServerProcess):
    """One member, in a separate session: a Ctrl-C in the terminal reaches only this program."""

    token = "raftkv-local"

    def spawn_options(self) -> Mapping[str, Any]:
        """Implement ``ServerProcess.spawn_options``."""
        return {"start_new_session": True}


def make_members(directory: Path, client_ports: Sequence[int], peer_ports: Sequence[int]) -> list[Member]:
    """Return members named node1, node2, ... with their data below a directory.

    Arguments:
        directory: directory for data and logs.
        client_ports, peer_ports: one port of each for a member.

    Raises:
        CommandError: the directory cannot be created or holds another cluster, or a port is used twice or taken.
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
    """Refuse data of another cluster, because its members would wait for each other silently for ever."""
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
            from raftkv.server.listening import holder_of

            raise CommandError(f"cannot listen on {HOST}:{port}: {error.strerror}{holder_of(port)}") from None


def start_all(members: Sequence[Member], flags: Sequence[str]) -> None:
    """Start every member; if one cannot be started, stop the others.

    Arguments:
        members: members to start.
        flags: further flags for every member.

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


# -- the command -----------------------------------------------------------------------------------------------------

REFRESH_S = 0.5
ASK_TIMEOUT_S = 0.4
"""Time without an answer after which a member is shown as silent; shorter than a refresh."""

FLAGS = (
    Flag("size", INT, 3, "number of members"),
    Flag("data-dir", default="cluster-data", usage="directory that holds one data directory for each member"),
    Flag("client-ports", LIST, usage="client ports, one for each member (2379,22379,32379,...)"),
    Flag("peer-ports", LIST, usage="peer ports, one for each member (2380,22380,32380,...)"),
)
_USAGE = """Usage:
  raftkv cluster [flags] [-- flags for every member]

Run members on loopback addresses of this machine until SIGINT or SIGTERM, and show them in a live table. A later start
continues with the same data. SIGUSR1 restarts members that ended.

Examples:
  raftkv cluster
  raftkv cluster --size 5 --data-dir /tmp/five -- --auto-compaction-retention 1h"""


def main(words: Sequence[str]) -> int:
    """Run a local cluster until it is stopped.

    Arguments:
        words: the command line after ``cluster``; what follows ``--`` goes to every member.

    Returns:
        0 if it was stopped by a signal, 1 if all members ended on their own.

    Raises:
        CommandError: the cluster cannot be started.
    """
    parsed = daemon.parse(FLAGS, words, "cluster", _USAGE, takes_rest=True)
    if parsed is None:
        return SUCCESS
    client_ports, peer_ports = _ports(parsed)
    members = make_members(Path(parsed.values["data-dir"]), client_ports, peer_ports)
    start_all(members, parsed.arguments)
    try:
        return asyncio.run(_watch(members))
    finally:
        stop_all(members, timeout_s=STOP_TIMEOUT_S)


def _ports(parsed: pflag.Parsed) -> tuple[list[int], list[int]]:
    size: int = parsed.values["size"]
    if not 1 <= size <= SIZE_MAX:
        raise CommandError(f"--size must be between 1 and {SIZE_MAX} (set to {size})", BAD_FLAGS)
    lists = []
    for name, first in (("client-ports", FIRST_CLIENT_PORT), ("peer-ports", FIRST_PEER_PORT)):
        given = parsed.values[name]
        if given and (len(given) != size or not all(port.isascii() and port.isdigit() for port in given)):
            raise CommandError(f"--{name} must be {size} numbers (set to {','.join(given)})", BAD_FLAGS)
        # The ports of etcd's own local cluster: 2379, 22379, 32379, ...
        usual = [first + (number + 1) * PORT_STEP if number else first for number in range(size)]
        lists.append([int(port) for port in given] if given else usual)
    return lists[0], lists[1]


@dataclass
class _Watcher:
    """Asks the members for their status, and keeps the last answers, from which rates are computed."""

    members: list[Member]
    clients: list[Client]
    last: dict[str, Sample] = field(default_factory=dict)
    answered: set[str] = field(default_factory=set)

    async def rows(self) -> list[Row]:
        """Return the current row of every member."""
        before, samples = self.last, await asyncio.gather(*map(self._sample, self.members, self.clients))
        self.last = {sample.endpoint: sample for sample in samples}
        return make_rows(before, samples)

    async def _sample(self, member: Member, client: Client) -> Sample:
        place = member.name, member.client_url
        if (ended := member.exit_status) is not None:
            return Sample(*place, time.monotonic(), error=_obituary(member, ended), silence="exited")
        try:
            status = await client.call(methods.STATUS, rpc_pb2.StatusRequest(), timeout_s=ASK_TIMEOUT_S)
        except StatusError:
            silence = "silent" if member.name in self.answered else "starting"
            return Sample(*place, time.monotonic(), silence=silence)
        self.answered.add(member.name)
        return Sample(*place, time.monotonic(), status)


def _start_ended(members: Sequence[Member]) -> None:
    for member in members:
        if member.exit_status is not None:
            member.start()


def _obituary(member: Member, status: int) -> str:
    how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
    words = member.last_words()
    return f"{how}: {words}" if words and status > 0 else how


async def _watch(members: list[Member]) -> int:
    stop = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(on_signals(stop.set, (*STOPPING, signal.SIGHUP)))
        stack.enter_context(on_signals(partial(_start_ended, members), (signal.SIGUSR1,)))
        options = ClientOptions(dial_timeout_s=ASK_TIMEOUT_S)
        clients = [await stack.enter_async_context(Client(m.client_url, options)) for m in members]
        watcher = _Watcher(members, clients)
        with _display(members) as show:
            while not stop.is_set():
                rows = await watcher.rows()
                show(rows)
                if all(row.role == "exited" for row in rows):
                    return ERROR
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), REFRESH_S)
    print("stopping all members", file=sys.stderr)
    return SUCCESS


@contextlib.contextmanager
def _display(members: Sequence[Member]) -> Iterator[Callable[[list[Row]], None]]:
    """Yield a function that shows rows: as a live table on a terminal, otherwise as lines after changes."""
    if not sys.stdout.isatty():
        before: list[Row] = []

        def show(rows: list[Row]) -> None:
            for line in news(before, rows):
                print(line, flush=True)
            before[:] = rows

        yield show
        return
    from rich.live import Live

    def table(rows: Sequence[Row]) -> Table:
        return make_table(rows, {one.name: one.process.pid for one in members if one.process and one.is_alive})

    with Live(table([]), auto_refresh=False) as live:
        yield lambda rows: live.update(table(rows), refresh=True)
