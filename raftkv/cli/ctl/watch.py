"""``watch``: print changes, run a command for each change, or read watch requests line by line.

Parses the words: before ``--`` the key and the end of the range, or neither if the environment has them; after ``--``
the command. ``parse_interactive`` parses the same from a line. Commands for ``lock`` are also started here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from raftkv.cli import pflag
from raftkv.cli.command import Invocation
from raftkv.cli.ctl.kv import split_words
from raftkv.cli.ctl.session import Session, open_session, remark, unanswered
from raftkv.cli.pflag import quote, text_bytes
from raftkv.cli.program import BAD_ARGUMENTS, ERROR, INTERRUPTED, INVALID_INPUT, CommandError, refused
from raftkv.client import Client
from raftkv.client.admin import interval
from raftkv.client.errors import explain_failures
from raftkv.client.watch import Request, Watcher, WatchHub, responses
from raftkv.errors import CompactedError, ConfigError, FutureRevisionError, StatusError
from raftkv.pb import rpc_pb2

KILLED_EXIT = 255
"""etcdctl's exit code when a signal has ended its child."""


class ChildFailed(Exception):
    """A user's command did not start, or failed; text and code are those of Go's ``os/exec``."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


async def start_child(words: Sequence[str], variables: Mapping[str, str]) -> asyncio.subprocess.Process:
    """Start a user's command, with this program's output and an empty input.

    Arguments:
        words: the command.
        variables: further environment variables.

    Raises:
        ChildFailed: the command cannot be started.
    """
    sys.stdout.flush()
    # When this program ends at the same time as its child, the transport and the child watcher both collect the exit
    # status, and asyncio logs that the second one found none. The message is noise.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    try:
        return await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.DEVNULL, env={**os.environ, **variables}
        )
    except FileNotFoundError:
        if "/" in words[0]:
            raise ChildFailed(f"fork/exec {words[0]}: no such file or directory", 1) from None
        raise ChildFailed(f'exec: "{words[0]}": executable file not found in $PATH', 1) from None
    except OSError as error:
        raise ChildFailed(f"fork/exec {words[0]}: {(error.strerror or str(error)).lower()}", 1) from None


async def finish_child(child: asyncio.subprocess.Process) -> None:
    """Wait for the end of a command.

    Raises:
        ChildFailed: its exit status was not 0.
    """
    code = await child.wait()
    if code < 0:
        name = signal.strsignal(-code) or f"signal {-code}"
        raise ChildFailed(f"signal: {name.lower()}", KILLED_EXIT)
    if code:
        raise ChildFailed(f"exit status {code}", code)


STANDARD_INPUT = 0
READ_BYTES = 65536
ASKED_PROGRESS = -1
"""Id of responses to progress requests; unrequested progress notifications have the id of the watch."""
OUTAGE_NOTED_S = 5.0
"""Time without an answering member after which standard error says so; a wrong endpoint looks like a quiet key."""
_BAD_NUMBER = "bad number of arguments"
_CONFLICT = "bad number of arguments (found conflicting environment key)"
_NO_COMMAND = "bad number of arguments (found separator --, but no commands)"


@dataclass(frozen=True)
class WatchSpec:
    """The key range to watch, and the command to run for each change (none if ``command`` is empty)."""

    request: Request
    progress_notify: bool
    command: tuple[str, ...] = ()


def environment_words() -> list[str]:
    """Return the key and the range end from ``ETCDCTL_WATCH_KEY`` and ``ETCDCTL_WATCH_RANGE_END``, as words.

    Raises:
        CommandError: an end without a key.
    """
    # Removed from the environment, because remaining ETCDCTL_* variables are reported as unknown.
    key, end = (os.environ.pop(f"ETCDCTL_WATCH_{name}", "") for name in ("KEY", "RANGE_END"))
    if end and not key:
        raise CommandError(f"ETCDCTL_WATCH_KEY is empty but got ETCDCTL_WATCH_RANGE_END={quote(end)}", BAD_ARGUMENTS)
    return [word for word in (key, end) if word]


def watch(invocation: Invocation) -> None:
    """Print changes until the cluster ends the watch."""
    environment = environment_words()
    if invocation["interactive"]:
        session = open_session(invocation)
        session.run(lambda client: _interact(client, session, environment))
        return
    words, command = _split(invocation)
    if words and environment:
        raise CommandError(_CONFLICT, BAD_ARGUMENTS)
    with refused(ConfigError, BAD_ARGUMENTS):
        spec = make_spec(invocation, [*environment, *words], command)
    session = open_session(invocation)

    async def follow(client: Client) -> None:
        async with watching(client) as hub:
            await _print(session, hub, spec)

    session.run(follow)
    raise CommandError("watch is canceled by the server", INTERRUPTED)


def _split(invocation: Invocation) -> tuple[list[str], tuple[str, ...]]:
    """Return the words before ``--``, and the command after it."""
    dash = invocation.before_dash
    if dash is None:
        return invocation.arguments, ()
    command = tuple(invocation.arguments[dash:])
    if not command:
        raise CommandError(_NO_COMMAND, BAD_ARGUMENTS)
    return invocation.arguments[:dash], command


def make_spec(invocation: Invocation, words: list[str], command: tuple[str, ...]) -> WatchSpec:
    """Return the watch that flags and words describe.

    Arguments:
        invocation: parsed flags.
        words: key and range end.
        command: command to run for each change.

    Raises:
        ConfigError: flags and words conflict.
    """
    if not words:
        raise ConfigError(_BAD_NUMBER)
    key, end = text_bytes(words[0]), b""
    if len(words) == 2:  # etcdctl ignores the end if more words follow; scripts may depend on it
        if invocation["prefix"]:
            raise ConfigError("`range_end` and `--prefix` are mutually exclusive")
        end = text_bytes(words[1])
    elif invocation["prefix"]:
        key, end = interval(key, prefix=True)
    less = {"keys_only": invocation["keys-only"], "max_value_bytes": invocation["max-value-bytes"]}
    request = Request(key, end, invocation["rev"], invocation["prev-kv"], progress=True, **less)
    return WatchSpec(request, invocation["progress-notify"], command)


def parse_interactive(line: str, environment: Sequence[str]) -> WatchSpec:
    """Parse a ``watch`` line.

    Arguments:
        line: line of the input.
        environment: key and range end from the environment.

    Raises:
        CommandError: the line ends the command.
        ConfigError: the line is only reported.
    """
    from raftkv.cli.ctl import tree as ctl_tree

    words = split_words(line)[1:]
    if not words and not environment:
        raise ConfigError("command type or key is not provided")
    with refused(pflag.HelpRequested, BAD_ARGUMENTS, "pflag: help requested"), refused(pflag.FlagError, BAD_ARGUMENTS):
        parsed = pflag.parse(ctl_tree.WATCH_FLAGS, words)
    invocation = Invocation(parsed.values, parsed.changed, parsed.arguments, before_dash=parsed.before_dash)
    given, command = _split(invocation)
    if not command and not given and not environment:
        raise CommandError(_BAD_NUMBER, BAD_ARGUMENTS)
    if not command and given and environment:
        raise CommandError(_CONFLICT, BAD_ARGUMENTS)
    return make_spec(invocation, [*environment, *given], command)


@asynccontextmanager
async def watching(client: Client) -> AsyncIterator[WatchHub]:
    """Yield the watches of a command; standard error reports each outage once."""
    hub = WatchHub(client)
    tell_outages(hub)
    try:
        yield hub
    finally:
        await hub.close()


def tell_outages(hub: WatchHub) -> None:
    """Report once for each outage, on standard error, that watches wait for a member."""
    noted_since: float | None = None

    def note() -> None:
        nonlocal noted_since
        since = hub.failing_since
        if noted_since == since or asyncio.get_running_loop().time() - since < OUTAGE_NOTED_S:
            return
        noted_since = since
        for line in (*unanswered(explain_failures(hub.failures)), "the watch continues when a member answers"):
            remark(line)

    hub.on_failure = note


async def _print(session: Session, hub: WatchHub, spec: WatchSpec) -> None:
    async with aclosing(_answers(hub, spec.request)) as answers:
        async for answer in answers:
            if answer.canceled:
                print(f"watch was canceled ({answer.cancel_reason})", file=sys.stderr, flush=True)
            elif not answer.events and answer.watch_id != ASKED_PROGRESS and not spec.progress_notify:
                continue  # the hub requests progress for its own use
            elif not answer.events:
                print(f"progress notify: {answer.header.revision}", flush=True)
            session.printer.show("watch", answer)
            if spec.command:
                await _run_for_each(answer, spec.command)


async def _answers(hub: WatchHub, request: Request) -> AsyncGenerator[rpc_pb2.WatchResponse, None]:
    """Yield the responses of a watch; the last one says why it has ended, in the words of etcd's client."""
    watcher = Watcher(request)
    try:
        async with aclosing(responses(hub, watcher)) as received:
            async for response in received:
                yield response
    except StatusError as error:
        refusal, reason = watcher.refusal, str(error)
    if refusal is not None and not refusal.created:
        default = CompactedError.text if refusal.compact_revision else FutureRevisionError.text
        refusal.cancel_reason = default if refusal.compact_revision else refusal.cancel_reason or default
        yield refusal
        return
    if refusal is not None:
        reason = refusal.cancel_reason or "watch canceled"
    yield rpc_pb2.WatchResponse(canceled=True, cancel_reason=reason)


async def _run_for_each(answer: rpc_pb2.WatchResponse, command: tuple[str, ...]) -> None:
    for event in answer.events:
        variables = {
            "ETCD_WATCH_REVISION": str(answer.header.revision),
            "ETCD_WATCH_EVENT_TYPE": '"DELETE"' if event.type else '"PUT"',
            "ETCD_WATCH_KEY": quote(event.kv.key),
            "ETCD_WATCH_VALUE": quote(event.kv.value),
        }
        try:
            await finish_child(await start_child(command, variables))
        except ChildFailed as error:
            print(f"command [{' '.join(map(quote, command))}] error ({error})", file=sys.stderr)
            raise CommandError("", ERROR) from None


async def _interact(client: Client, session: Session, environment: Sequence[str]) -> None:
    """Execute each line, until the end of the input or of a command."""
    try:
        async with watching(client) as hub, asyncio.TaskGroup() as printing:
            async for line in _lines():
                words = split_words(line)
                if not words:
                    _complain(f"Invalid command: {line} (watch and progress supported)")
                elif words[0] == "watch":
                    try:
                        spec = parse_interactive(line, environment)
                    except ConfigError as error:
                        _complain(f"Invalid command {line} ({error})")
                    else:
                        printing.create_task(_print(session, hub, spec))
                elif words[0] == "progress":
                    hub.request_progress()
                else:
                    _complain(f"Invalid command {line} (only support watch)")
            raise CommandError("error reading watch request line: EOF", INVALID_INPUT)
    except BaseExceptionGroup as group:
        failures = group.subgroup(CommandError)
        raise (failures.exceptions[0] if failures else group.exceptions[0]) from None


def _complain(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def _lines() -> AsyncIterator[str]:
    """Yield lines of standard input, read by a thread, because a terminal or a file cannot be awaited.

    The descriptor is read, not ``sys.stdin``: a thread blocked inside a buffered file would crash the interpreter at
    its shutdown.
    """
    loop = asyncio.get_running_loop()
    chunks: asyncio.Queue[bytes] = asyncio.Queue()

    def read() -> None:
        data = b" "
        while data:
            try:
                data = os.read(STANDARD_INPUT, READ_BYTES)
            except OSError:  # there is no input
                data = b""
            try:
                loop.call_soon_threadsafe(chunks.put_nowait, data)
            except RuntimeError:  # the loop has ended before the input
                return

    threading.Thread(target=read, name="standard-input", daemon=True).start()
    rest = b""
    while data := await chunks.get():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line.decode("utf-8", "surrogateescape")
