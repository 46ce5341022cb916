"""``raftkv cluster``: several members on this machine, from nothing, in one terminal.

Owns the loop that watches them: every half second each member is asked for its status, and the answers are shown. A
member that ends is shown as ended and not restarted, so that one can be killed to see what the others do. Ctrl-C, or
the end of this program by any other signal it can catch, ends all members.

    raftkv cluster --size 3 --data-dir cluster-data -- --snapshot-count=1000
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from raftkv.cli.cluster import members as members_module
from raftkv.cli.cluster.members import Member
from raftkv.cli.cluster.view import Row, make_table, news
from raftkv.cli.daemons import daemon
from raftkv.cli.exits import BAD_FLAGS, ERROR, SUCCESS, CommandError
from raftkv.cli.goflags import pflag
from raftkv.cli.goflags.pflag import INT, LIST, Flag
from raftkv.client import Client, ClientOptions
from raftkv.client.local.process import stop_all
from raftkv.client.rpc import methods
from raftkv.errors import StatusError
from raftkv.pb import rpc_pb2

if TYPE_CHECKING:
    from raftkv.pb.rpc_pb2 import StatusResponse

REFRESH_S = 0.5
ASK_TIMEOUT_S = 0.4
"""A member that does not answer within this is shown as silent; shorter than a refresh."""

FLAGS = (
    Flag("size", INT, 3, "number of members"),
    Flag("data-dir", default="cluster-data", usage="directory below which each member has its own"),
    Flag("client-ports", LIST, usage="ports for clients, one a member (2379,22379,32379,...)"),
    Flag("peer-ports", LIST, usage="ports between members, one a member (2380,22380,32380,...)"),
)


def main(words: Sequence[str]) -> int:
    """Run a local cluster until it is stopped.

    Arguments:
        words: the command line after ``cluster``; what follows ``--`` goes to every member.

    Returns:
        0 if it was stopped by a signal, 1 if all members ended on their own.

    Raises:
        CommandError: it cannot be started.
    """
    try:
        parsed = daemon.parse(FLAGS, words, "cluster", takes_rest=True)
    except pflag.HelpRequested:
        return _help()
    client_ports, peer_ports = _ports(parsed)
    with members_module.claimed([*client_ports, *peer_ports]):
        members = members_module.make_members(Path(parsed.values["data-dir"]), client_ports, peer_ports)
        members_module.start_all(members, parsed.arguments)
        try:
            return asyncio.run(_watch(members))
        finally:
            stop_all(members, timeout_s=members_module.STOP_TIMEOUT_S)


def _help() -> int:
    print("Usage:\n  raftkv cluster [options] [-- flags for every member]\n\nOptions:")
    daemon.print_flags(FLAGS)
    return SUCCESS


def _ports(parsed: pflag.Parsed) -> tuple[list[int], list[int]]:
    size: int = parsed.values["size"]
    if not 1 <= size <= members_module.SIZE_MAX:
        raise CommandError(f"--size must be between 1 and {members_module.SIZE_MAX} (set to {size})", BAD_FLAGS)
    lists = []
    for name, first in (
        ("client-ports", members_module.FIRST_CLIENT_PORT),
        ("peer-ports", members_module.FIRST_PEER_PORT),
    ):
        given = parsed.values[name]
        if given and (len(given) != size or not all(port.isascii() and port.isdigit() for port in given)):
            raise CommandError(f"--{name} must be {size} numbers (set to {','.join(given)})", BAD_FLAGS)
        lists.append([int(port) for port in given] if given else members_module.default_ports(first, size))
    return lists[0], lists[1]


@dataclass
class _Watcher:
    """Asks the members and remembers what is needed for rates."""

    members: list[Member]
    clients: list[Client]
    last: dict[str, tuple[float, int]] = field(default_factory=dict)
    answered: set[str] = field(default_factory=set)

    async def rows(self) -> list[Row]:
        """Return every member as it is now."""
        return list(await asyncio.gather(*map(self._row, self.members, self.clients)))

    async def _row(self, member: Member, client: Client) -> Row:
        if (status := member.exit_status) is not None:
            return Row(member.name, member.client_url, "exited", remark=_obituary(member, status))
        try:
            answer = await client.call(methods.STATUS, rpc_pb2.StatusRequest(), timeout_s=ASK_TIMEOUT_S)
        except StatusError:
            role = "silent" if member.name in self.answered else "starting"
            return Row(member.name, member.client_url, role)
        self.answered.add(member.name)
        return Row(
            member.name,
            member.client_url,
            _role(answer),
            term=answer.raftTerm,
            index=answer.raftIndex,
            applied=answer.raftAppliedIndex,
            revision=answer.header.revision,
            size_bytes=answer.dbSize,
            writes_per_s=self._rate(member.name, answer.header.revision),
        )

    def _rate(self, name: str, revision: int) -> float:
        """Revisions a second since the last look: one is a put, a delete or a writing transaction."""
        now = time.monotonic()
        before, self.last[name] = self.last.get(name), (now, revision)
        if before is None or now <= before[0]:
            return 0.0
        return max(revision - before[1], 0) / (now - before[0])


def _role(answer: StatusResponse) -> str:
    if answer.isLearner:
        return "learner"
    if not answer.leader:
        return "candidate"
    return "leader" if answer.leader == answer.header.member_id else "follower"


def _obituary(member: Member, status: int) -> str:
    how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
    words = member.last_words()
    return f"{how}: {words}" if words and status > 0 else how


async def _watch(members: list[Member]) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    async with contextlib.AsyncExitStack() as stack:
        options = ClientOptions(dial_timeout_s=ASK_TIMEOUT_S)
        clients = [await stack.enter_async_context(Client(m.client_url, options)) for m in members]
        watcher = _Watcher(members, clients)
        with _display() as show:
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
def _display() -> Iterator[Callable[[list[Row]], None]]:
    """Return a function that shows rows: as a live table on a terminal, else as lines when something changed."""
    if not sys.stdout.isatty():
        yield _Lines().show
        return
    from rich.live import Live

    with Live(make_table([]), auto_refresh=False) as live:
        yield lambda rows: live.update(make_table(rows), refresh=True)


class _Lines:
    def __init__(self) -> None:
        self.before: list[Row] = []

    def show(self, rows: list[Row]) -> None:
        for line in news(self.before, rows):
            print(line, flush=True)
        self.before = rows
