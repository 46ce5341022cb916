"""``top``: the cluster, live in the terminal.

Owns the asking and the screen. Members are those that the cluster lists, asked for again at every look, so that one
that joins appears; one that is gone stays in the table as silent. Elsewhere than on a terminal, and with ``--once`` or
``--json``, plain tables or one JSON object a line are printed.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from raftkv.cli import metrics
from raftkv.cli.ctl.session import Session, open_session
from raftkv.cli.exits import BAD_ARGUMENTS, ERROR, CommandError
from raftkv.cli.goflags.command import Invocation
from raftkv.cli.top.model import ANSWERING, Row, Sample, make_rows, total
from raftkv.cli.top.view import View
from raftkv.client import Client
from raftkv.client.rpc import methods
from raftkv.errors import ConfigError, StatusError
from raftkv.pb import rpc_pb2

ASK_TIMEOUT_S: Final = 1.0
"""A member that does not answer within this is shown as silent."""

ONCE_WIDTH: Final = 200
"""Columns of a table that goes to a file."""

Show = Callable[[list[Row]], None]


def top(invocation: Invocation) -> None:
    """Look, show, look again."""
    if invocation.arguments:
        raise CommandError("top command accepts no arguments", BAD_ARGUMENTS)
    if invocation["interval"] <= 0:
        raise CommandError("--interval must be above 0", BAD_ARGUMENTS)
    session = open_session(invocation)
    session.options = replace(session.options, explain=True)
    session.run(lambda client: _watch(client, session, invocation))


async def _watch(client: Client, session: Session, invocation: Invocation) -> None:
    looker = Looker(client, session)
    interval_s, once = invocation["interval"], invocation["once"]
    stop, wake = asyncio.Event(), asyncio.Event()
    rows = await looker.look()
    if once:
        # Rates need two looks.
        await asyncio.sleep(interval_s)
        rows = await looker.look()
        _printer(invocation["json"])(rows)
        if not any(row.role in ANSWERING for row in rows):
            raise CommandError("no member answers", ERROR)
        return
    with _signals(stop, wake), _screen(invocation["json"], stop, wake) as show:
        while not stop.is_set():
            show(rows)
            await _pause(interval_s, stop, wake)
            if not stop.is_set():
                rows = await looker.look()


async def _pause(interval_s: float, stop: asyncio.Event, wake: asyncio.Event) -> None:
    """Wait for the next look; a resized window or the end comes sooner."""
    try:
        async with asyncio.timeout(interval_s):
            await wake.wait()
    except TimeoutError:
        pass
    if not stop.is_set():
        wake.clear()


@contextmanager
def _signals(stop: asyncio.Event, wake: asyncio.Event) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def end() -> None:
        stop.set()
        wake.set()

    numbers = {signal.SIGINT: end, signal.SIGTERM: end, signal.SIGWINCH: wake.set}
    for number, handler in numbers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


@contextmanager
def _screen(as_json: bool, stop: asyncio.Event, wake: asyncio.Event) -> Iterator[Show]:
    if as_json or not sys.stdout.isatty():
        yield _printer(as_json)
        return
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if console.is_dumb_terminal:  # it cannot move its cursor: table below table
        yield _printer(as_json)
        return
    with _keys(stop, wake), Live(console=console, screen=True, auto_refresh=False) as live:
        yield lambda rows: live.update(View(rows, "q quits"), refresh=True)


@contextmanager
def _keys(stop: asyncio.Event, wake: asyncio.Event) -> Iterator[None]:
    """Let q end it, if there is a keyboard; each key is read as it is pressed."""
    if not sys.stdin.isatty():
        yield
        return
    import os
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    saved = termios.tcgetattr(descriptor)
    loop = asyncio.get_running_loop()

    def pressed() -> None:
        if os.read(descriptor, 64) in (b"q", b"Q", b"\x1b", b""):
            stop.set()
            wake.set()

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, pressed)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, saved)


def _printer(as_json: bool) -> Show:
    def show_json(rows: list[Row]) -> None:
        print(json.dumps({"cluster": total(rows), "members": [row.to_dict() for row in rows]}), flush=True)

    def show_table(rows: list[Row]) -> None:
        from rich.console import Console

        console = Console() if sys.stdout.isatty() else Console(width=ONCE_WIDTH)
        console.print(View(rows))

    return show_json if as_json else show_table


@dataclass
class Looker:
    """Asks all members, and remembers the last answers for rates."""

    client: Client
    session: Session
    members: dict[str, str] = field(default_factory=dict)
    last: dict[str, Sample] = field(default_factory=dict)

    async def look(self) -> list[Row]:
        """Return every member as it is now."""
        await self._list_members()
        samples = await asyncio.gather(*(self._sample(endpoint, name) for endpoint, name in self.members.items()))
        rows = make_rows(self.last, samples)
        self.last = {sample.endpoint: sample for sample in samples}
        return rows

    async def _list_members(self) -> None:
        """Find endpoint and name of each member; if no member says them, those known before or given."""
        request = rpc_pb2.MemberListRequest(linearizable=False)
        try:
            answer = await self.client.call(methods.MEMBER_LIST, request, timeout_s=ASK_TIMEOUT_S)
        except StatusError:
            listed = {}
        else:
            listed = {member.clientURLs[0]: member.name for member in answer.members if member.clientURLs}
        self.members = listed or self.members or {endpoint: endpoint for endpoint in self.session.endpoints}

    async def _sample(self, endpoint: str, name: str) -> Sample:
        status, samples = await asyncio.gather(self._status(endpoint), self._metrics(endpoint))
        now_s = time.monotonic()
        if isinstance(status, str):
            return Sample(name, endpoint, now_s, error=status)
        header = status.header
        return Sample(
            name,
            endpoint,
            now_s,
            member_id=header.member_id,
            role=_role(status),
            version=status.version,
            term=status.raftTerm,
            index=status.raftIndex,
            applied=status.raftAppliedIndex,
            revision=header.revision,
            db_size_bytes=status.dbSize,
            alarms=tuple(status.errors),
            metrics=samples,
        )

    async def _status(self, endpoint: str) -> rpc_pb2.StatusResponse | str:
        request = rpc_pb2.StatusRequest()
        try:
            return await self.client.call_at(endpoint, methods.STATUS, request, timeout_s=ASK_TIMEOUT_S)
        except (StatusError, ConfigError) as error:
            return str(error)

    async def _metrics(self, endpoint: str) -> dict[str, float]:
        try:
            return await asyncio.to_thread(metrics.fetch, endpoint, self.session.options.tls, ASK_TIMEOUT_S)
        except (OSError, ConfigError):
            return {}


def _role(status: Any) -> str:
    if status.isLearner:
        return "learner"
    if not status.leader:
        return "candidate"
    return "leader" if status.leader == status.header.member_id else "follower"
