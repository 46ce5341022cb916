"""``cluster roll``: restart all members one after another by the operator's own command, the leader last.

Members that are down come first, so a roll continues an interrupted one. Before each step, every member is asked for
its status. A step is safe when the remaining voters that are in sync are a quorum; an unsafe step is refused with the
reason, and the roll ends. A leader transfers its leadership before its restart. The next step waits until the restarted
member has applied the leader's log as of its return. If a member's metrics show that the old process is still running,
it was not restarted, and the roll ends.

The command must return after the old process has ended, as ``systemctl restart`` does. Its words are split as by a
shell, but run without one; ``{host}``, ``{name}`` and ``{id}`` stand for the member. Names that a shell would interpret
are refused, because the command may pass them to a shell on another host.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from raftkv.cli import pflag
from raftkv.cli.command import Invocation
from raftkv.cli.ctl import top
from raftkv.cli.ctl.members import outcome
from raftkv.cli.ctl.session import REFUSED_PATIENCE_S, open_session
from raftkv.cli.program import BAD_ARGUMENTS, ERROR, CommandError
from raftkv.client.rpc import methods
from raftkv.errors import ConfigError, StatusError
from raftkv.pb import rpc_pb2

if TYPE_CHECKING:
    from raftkv.client import Client

LAG_MAX_ENTRIES: Final = 1_000
"""Maximum lag in entries of a member that is in sync."""
PAUSE_S: Final = 0.5
_PLAIN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]*")
_FIELDS: Final = ("host", "name", "id")

Run = Callable[[Sequence[str]], Awaitable[int]]
"""Runs a command; returns its exit status."""


@dataclass(frozen=True)
class Seen:
    """A member and its state; ``problem`` says why it does not count towards the quorum."""

    member: rpc_pb2.Member
    status: rpc_pb2.StatusResponse
    problem: str = ""

    @property
    def is_leader(self) -> bool:
        """Whether it is the leader."""
        return 0 != self.status.leader == self.member.ID


def cluster_roll(invocation: Invocation) -> None:
    """Restart every member; with ``--dry-run``, only print the steps."""
    template = invocation["restart"]
    if not template:
        raise CommandError("cluster roll needs --restart, such as 'ssh {host} systemctl restart raftkv'", BAD_ARGUMENTS)
    session = open_session(invocation, refused_patience_s=REFUSED_PATIENCE_S)

    async def roll(client: Client) -> None:
        steps = Roll(client, template, session.timeout_s, invocation["wait"], _run, _say, started_at)
        await steps.all(invocation["dry-run"])

    async def started_at(endpoint: str) -> float | None:
        try:
            found = await asyncio.to_thread(top.fetch, endpoint, session.options.tls, session.timeout_s)
        except (OSError, ConfigError):
            return None
        return found.get("process_start_time_seconds")

    session.run(roll)


async def _run(words: Sequence[str]) -> int:
    try:
        child = await asyncio.create_subprocess_exec(*words, stdin=asyncio.subprocess.DEVNULL)
    except OSError as error:
        raise CommandError(f"cannot run {words[0]}: {error.strerror}", ERROR) from None
    return await child.wait()


def _say(text: str) -> None:
    print(text, flush=True)


@dataclass
class Roll:
    """The restarts of one cluster.

    Attributes:
        client: client of the cluster.
        template: command with placeholders.
        timeout_s: time limit of each status call.
        wait_s: time limit until a restarted member is in sync.
        run: runs a command.
        say: prints a line.
        started_at: returns the start time of the process at an endpoint; None: unknown.
    """

    client: Any
    template: str
    timeout_s: float
    wait_s: float
    run: Run
    say: Callable[[str], None]
    started_at: Callable[[str], Awaitable[float | None]]

    async def all(self, is_dry: bool) -> None:
        """Restart every member, or print the steps.

        Raises:
            CommandError: a step is not safe, a command failed, or a member did not come back.
        """
        seen = await self._look()
        left = [one.member for one in sorted(seen, key=_order)]
        commands = {member.ID: command(self.template, member) for member in left}
        for number, member in enumerate(left, 1):
            one = next(one for one in seen if one.member.ID == member.ID)
            first = "hand leadership over, then restart" if one.is_leader else "restart"
            self.say(f"{number} of {len(left)}: {first} {member.name}: {shlex.join(commands[member.ID])}")
        refuse_unsafe(seen, left[0])
        self.say(f"next safe step: restart {left[0].name}")
        if is_dry:
            return
        for number, member in enumerate(left, 1):
            seen = await self._look()
            try:
                refuse_unsafe(seen, member)
                await self._hand_over(seen, member)
                self.say(f"restarting {member.name} ({number} of {len(left)})")
                before = await self._start_of(member)
                if status := await self.run(commands[member.ID]):
                    raise CommandError(f"the restart command for {member.name} ended with status {status}", ERROR)
                applied = await self._wait(member)
                if before is not None and await self._start_of(member) == before:
                    text = f"{member.name} was not restarted: its old process still runs"
                    raise CommandError(f"{text}; the command must return after it has ended", ERROR)
                self.say(f"{member.name} is back, with {applied:,} entries applied")
            except (CommandError, asyncio.CancelledError) as error:
                done = "restarted so far: " + (", ".join(one.name for one in left[: number - 1]) or "none")
                if isinstance(error, CommandError):
                    raise CommandError(str(error), ERROR, [*error.details, done]) from None
                self.say(f"interrupted at {member.name}, which may be down; {done}; to continue, roll again")
                raise

    async def _start_of(self, member: rpc_pb2.Member) -> float | None:
        return await self.started_at(member.clientURLs[0]) if member.clientURLs else None

    async def _look(self) -> list[Seen]:
        """Return the state of every member."""
        request = rpc_pb2.MemberListRequest(linearizable=True)
        listed = await self.client.call(methods.MEMBER_LIST, request, timeout_s=self.timeout_s)
        return in_sync(await asyncio.gather(*map(self._ask, listed.members)))

    async def _ask(self, member: rpc_pb2.Member) -> Seen:
        if not member.clientURLs:
            return Seen(member, rpc_pb2.StatusResponse(), "was never started")
        request = rpc_pb2.StatusRequest()
        status = await outcome(self.client, member.clientURLs[0], methods.STATUS, request, self.timeout_s)
        if isinstance(status, Exception):
            return Seen(member, rpc_pb2.StatusResponse(), f"does not answer ({status})")
        if status.header.member_id != member.ID:
            return Seen(member, rpc_pb2.StatusResponse(), f"does not answer ({member.clientURLs[0]} is another member)")
        return Seen(member, status, "" if status.leader else "knows no leader")

    async def _hand_over(self, seen: Sequence[Seen], member: rpc_pb2.Member) -> None:
        """Transfer the leadership to another voter, if this member is the leader."""
        if not any(one.is_leader and one.member.ID == member.ID for one in seen):
            return
        others = [one for one in seen if one.member.ID != member.ID and not one.member.isLearner and not one.problem]
        target = max(others, key=lambda one: one.status.raftAppliedIndex).member
        self.say(f"handing leadership from {member.name} to {target.name}")
        request = rpc_pb2.MoveLeaderRequest(targetID=target.ID)
        await self.client.call_at(member.clientURLs[0], methods.MOVE_LEADER, request, timeout_s=self.timeout_s)

    async def _wait(self, member: rpc_pb2.Member) -> int:
        """Wait until a member is in sync again; return its applied index."""
        deadline = time.monotonic() + self.wait_s
        problem = ""
        while time.monotonic() < deadline:
            try:
                one = next(one for one in await self._look() if one.member.ID == member.ID)
            except StatusError as error:  # the remaining members elect another leader
                problem = str(error)
            else:
                problem = one.problem
                if not problem:
                    return one.status.raftAppliedIndex
            await asyncio.sleep(PAUSE_S)
        wait = pflag.format_duration(round(self.wait_s * 1e9))
        raise CommandError(f"{member.name} was not in sync {wait} after its restart: it {problem}", ERROR)


def _order(one: Seen) -> tuple[bool, bool, bool]:
    """Sort members for a roll: first those that are down, as an interrupted roll leaves one; the leader last."""
    return one.is_leader, not one.problem, not one.member.isLearner


def in_sync(seen: Sequence[Seen]) -> list[Seen]:
    """Mark the members that lag too far behind to count."""
    newest = max((one.status.raftAppliedIndex for one in seen), default=0)

    def checked(one: Seen) -> Seen:
        lag = newest - one.status.raftAppliedIndex
        behind = "" if lag <= LAG_MAX_ENTRIES else f"is {lag:,} entries behind"
        return Seen(one.member, one.status, one.problem or behind)

    return [checked(one) for one in seen]


def refuse_unsafe(seen: Sequence[Seen], member: rpc_pb2.Member) -> None:
    """Refuse the restart of a member if the others would have no quorum.

    Raises:
        CommandError: too few members remain; the text names those that do not count.
    """
    voters = [one for one in seen if not one.member.isLearner]
    staying = [one for one in voters if one.member.ID != member.ID and not one.problem]
    quorum = len(voters) // 2 + 1
    if len(staying) >= quorum:
        return
    details = [f"{one.member.name or f'{one.member.ID:x}'} {one.problem}" for one in voters if one.problem]
    text = f"restarting {member.name} is not safe: it leaves {len(staying)} voters in sync, and a quorum is {quorum}"
    raise CommandError(text, ERROR, details)


def command(template: str, member: rpc_pb2.Member) -> list[str]:
    """Return the command that restarts a member.

    Raises:
        CommandError: an unknown placeholder, an unclosed quote, or a member whose name a shell would interpret.
    """
    host = urlsplit(member.clientURLs[0]).hostname or "" if member.clientURLs else ""
    values = dict(zip(_FIELDS, (host, member.name, f"{member.ID:x}"), strict=True))
    try:
        words = shlex.split(template)
        used = {name for word in words for name in re.findall(r"{(\w*)}", word)}
        if unknown := used - set(_FIELDS):
            raise ValueError(f"{{{min(unknown)}}} is none of {{host}}, {{name}}, {{id}}")
        if odd := [name for name in used if not _PLAIN.fullmatch(values[name])]:
            raise ValueError(f"the {min(odd)} of member {member.ID:x} is {values[min(odd)]!r}, not plain letters")
    except ValueError as error:
        raise CommandError(f"--restart: {error}", BAD_ARGUMENTS) from None
    return [re.sub(r"{(\w*)}", lambda found: values[found[1]], word) for word in words]
