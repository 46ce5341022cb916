"""What the measurements of ``raftkvctl bench`` share: flags, the progress bar, how a result is printed."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection, wait
from threading import Barrier, BrokenBarrierError
from typing import Any, TypeVar, cast

import click

from raftkv.cli.bench.load import PREFIX, Load, LoadError, Request, Result
from raftkv.cli.command import HELP_ROW
from raftkv.cli.program import CTRL_C
from raftkv.cli.table import progress_bar
from raftkv.client import Client, ClientOptions
from raftkv.client.rpc import methods
from raftkv.client.rpc.transport import tls_context
from raftkv.client.scope import prefix_end
from raftkv.errors import RaftKVError
from raftkv.pb import rpc_pb2
from raftkv.rpc.status import RpcError

# -- processes ------------------------------------------------------------------------------------------------------
#
# Load from several processes at once: one Python process is busy long before a fast cluster is.
#
# The parent forks before it has threads or a loop; each child connects, waits for the others, makes its share of the
# calls, and sends its measurement back through a pipe. A child that fails sends the reason instead. Ctrl-C reaches
# the
# parent alone, which passes it on once; children then send what they have measured until then. Signals are held back
# while processes are forked, so that none comes before its handler is there.

START_TIMEOUT_S = 60.0

MakeLoad = Callable[[int, Callable[[int], None]], Load]
"""Makes the clients of one process, given its rank and what counts the answered calls."""

MakeRequests = Callable[[int], Iterator[Request]]
"""Makes the requests of one process, given its rank."""

PROGRESS_S = 0.2
_NUMBERS = (signal.SIGINT, signal.SIGTERM)


def run_in_processes(
    make_load: MakeLoad,
    make_requests: MakeRequests,
    total: int,
    processes: int,
    on_progress: Callable[[int], None] = lambda answered: None,
) -> Result:
    """Make ``total`` calls from so many processes.

    Arguments:
        make_load, make_requests: of one process, by its rank; ``make_load`` is also given where to tell its progress.
        total: calls of all processes together.
        processes: how many.
        on_progress: told now and then how many calls are answered.

    Raises:
        LoadError: a process could not measure.
    """
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(processes)
    answered = context.Array("q", processes, lock=False)
    children: list[Any] = []
    receivers: list[Connection] = []
    with ExitStack() as stack:
        with signals_held_back():
            for rank in range(processes):
                share = total // processes + (rank < total % processes)
                receiver, sender = context.Pipe(duplex=False)
                arguments = (make_load, make_requests, rank, share, barrier, sender, answered)
                child = context.Process(target=_run_child, args=arguments, daemon=True)
                child.start()
                sender.close()
                children.append(child)
                receivers.append(receiver)
            stack.enter_context(_passing_on_signals(children))
        while any(not receiver.poll() for receiver in receivers):
            wait([receiver for receiver in receivers if not receiver.poll()], PROGRESS_S)
            on_progress(sum(answered))
        answers = [_receive(receiver) for receiver in receivers]
    for child in children:
        child.join()
    return Result.merged(answers)


@contextmanager
def signals_held_back() -> Iterator[None]:
    """SIGINT and SIGTERM wait until the end of the block; in a child that is forked in it, for ``leave_terminal``."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _NUMBERS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _passing_on_signals(children: list[Any]) -> Iterator[None]:
    """The first SIGINT or SIGTERM goes to the children; a second one ends this process."""
    before = [signal.getsignal(number) for number in _NUMBERS]

    def pass_on(number: int, frame: object) -> None:
        restore()
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGINT)

    def restore() -> None:
        for number, handler in zip(_NUMBERS, before, strict=True):
            signal.signal(number, handler)

    for number in _NUMBERS:
        signal.signal(number, pass_on)
    try:
        yield
    finally:
        restore()


def _receive(receiver: Connection) -> Result:
    try:
        kind, answer = receiver.recv_bytes(), receiver.recv_bytes()
    except EOFError:
        raise LoadError("a load process ended without an answer") from None
    if kind != b"r":
        raise LoadError(answer.decode())
    return Result.from_bytes(answer)


def _run_child(
    make_load: MakeLoad,
    make_requests: MakeRequests,
    rank: int,
    total: int,
    barrier: Any,
    sender: Connection,
    answered: Any,
) -> None:
    def on_progress(count: int) -> None:
        answered[rank] = count

    answer = b"e", b"interrupted"
    with suppress(KeyboardInterrupt):
        try:
            leave_terminal()
            result = asyncio.run(_measure(make_load(rank, on_progress), make_requests(rank), total, barrier))
            answer = b"r", result.to_bytes()
        except (RaftKVError, RpcError, OSError, BrokenBarrierError) as error:
            answer = b"e", (str(error) or "another load process failed").encode()
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the answer leaves whole
    if answer[0] == b"e":
        barrier.abort()
    with suppress(BrokenPipeError):  # the parent was killed
        for part in answer:
            sender.send_bytes(part)


def leave_terminal() -> None:
    """Ignore Ctrl-C in a child, which ends with its parent's pipe: the parent passes it on.

    That waits for ``hear_parent``: while a loop is made, an interrupt would leave half a one, and its traceback.
    """
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))


def hear_parent() -> None:
    """Let an interrupt cancel what runs on the loop that is there now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _NUMBERS)


async def _measure(load: Load, requests: Iterator[Request], total: int, barrier: Barrier) -> Result:
    hear_parent()
    return await load.run(requests, total=total, when_connected=lambda: barrier.wait(START_TIMEOUT_S))


F = TypeVar("F", bound=Callable[..., Any])
SETUP_TIMEOUT_S = 10.0


def within(kind: type[int] | type[float], least: float, most: float = math.inf) -> Callable[[str], float]:
    """Return what reads a number within bounds, and refuses others in words.

    Arguments:
        kind: int or float.
        least, most: the bounds.
    """
    name = "a whole number" if kind is int else "a number"
    bounds = f"of {least} or more" if most == math.inf else f"from {least} to {most}"

    def read(text: str) -> float:
        try:
            found = kind(text)
        except ValueError:
            found = math.nan
        if least <= found <= most:
            return found
        raise click.BadParameter(f"{text} is not {name} {bounds}")

    return read


class Measurement(click.Command):
    """A command whose page is worded as those of the other commands."""

    def __init__(self, name: str | None, **more: Any) -> None:
        super().__init__(name, **{"options_metavar": "[options]", **more})

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        """Return the flag that prints the page."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.help = HELP_ROW[1]
        return option


def number(name: str, default: int, least: int, text: str) -> Callable[[F], F]:
    """Return a flag that is a whole number.

    Arguments:
        name: of the flag.
        default: its value when it is not given.
        least: the smallest that is allowed.
        text: for the help page.
    """
    kind = within(int, least)
    return click.option(name, default=default, show_default=True, type=kind, metavar="N", help=text)


def example(*words: str) -> str:
    """Return what stands below a help page: command lines, without the program's name."""
    title = "Examples" if len(words) > 1 else "Example"
    return "\b\n" + "\n".join([f"{title}:", *(f"  raftkvctl bench {line}" for line in words)])


def shared_flags(function: F) -> F:
    """Return the flags that every measurement has."""
    options = (
        click.option(
            "--endpoints",
            default="127.0.0.1:2379",
            show_default=True,
            envvar="ETCDCTL_ENDPOINTS",
            show_envvar=True,
            help="members to measure, separated by commas",
        ),
        number("--clients", 1, 1, "number of clients; each has one call under way"),
        number("--conns", 1, 1, "number of connections that the clients share"),
        number("--processes", 1, 1, "number of processes that make the load"),
        number("--total", 10_000, 1, "number of calls to make"),
        *_connection_flags(),
        click.option("--target-leader", is_flag=True, help="connect to the leader only"),
        number("--seed", 1, 0, "seed of the random keys and values"),
        click.option("--json", "as_json", is_flag=True, help="print the result as one JSON object"),
    )
    for option in reversed(options):
        function = option(function)
    return function


_CONNECTION = "raftkv.bench.connection"
_CONNECTION_FLAGS = (
    ("--cacert", "ETCDCTL_CACERT", "ca_file", "authorities of the members' certificates"),
    ("--cert", "ETCDCTL_CERT", "cert_file", "certificate to show"),
    ("--cert-key", "ETCDCTL_KEY", "key_file", "key of that certificate"),
)


def _connection_flags() -> Iterator[Callable[[F], F]]:
    """Flags that no measurement looks at: ``client_options`` does, where connections are made."""

    def note(context: click.Context, parameter: click.Parameter, value: str) -> None:
        context.meta.setdefault(_CONNECTION, {})[parameter.name] = value

    for name, variable, field, text in _CONNECTION_FLAGS:
        yield click.option(
            name, field, default="", envvar=variable, show_envvar=True, expose_value=False, callback=note, help=text
        )


def client_options() -> ClientOptions:
    """Return how to connect, by the command line."""
    context = click.get_current_context(silent=True)
    given = context.meta.get(_CONNECTION, {}) if context is not None else {}
    if not any(given.values()):
        return ClientOptions()
    try:
        return ClientOptions(tls=tls_context(**given))
    except OSError as error:
        raise click.ClickException(f"cannot use the certificates: {error}") from None


def writes(function: F) -> F:
    """Let a measurement write below ``PREFIX``: it says so first, and its keys are deleted afterwards."""

    @functools.wraps(function)
    def measured(*, keep_keys: bool, **given: Any) -> None:
        members = given["endpoints"].split(",")
        with failures_in_one_line():  # a cluster that cannot be reached is said before anything else
            asyncio.run(_delete_keys(members, limit=0))
        if not given["as_json"]:
            end = "the keys stay" if keep_keys else "the keys are deleted at the end"
            click.echo(f"raftkvctl: writes below {PREFIX.decode()}; {end}, their history is compacted later", err=True)
        try:
            function(**given)
        finally:
            if not keep_keys:
                try:
                    asyncio.run(_delete_keys(members))
                except (
                    RaftKVError,
                    RpcError,
                    OSError,
                ) as error:  # what the measurement itself says stays the last line
                    click.echo(f"raftkvctl: the keys below {PREFIX.decode()} were not deleted: {error}", err=True)

    text = f"leave what was written below {PREFIX.decode()}"
    return cast(F, click.option("--keep-keys", is_flag=True, help=text)(measured))


async def _delete_keys(endpoints: list[str], limit: int = 10_000) -> None:
    """Delete all keys of measurements, so many at a time; with none at a time it only asks whether they can be read."""
    end = prefix_end(PREFIX)
    async with Client(endpoints, client_options()) as client:
        while True:
            request = rpc_pb2.RangeRequest(key=PREFIX, range_end=end, limit=limit, keys_only=True, count_only=not limit)
            found = await client.call(methods.RANGE, request, timeout_s=SETUP_TIMEOUT_S)
            if not found.kvs:
                return
            delete = rpc_pb2.DeleteRangeRequest(key=PREFIX, range_end=found.kvs[-1].key + b"\0")
            await client.call(methods.DELETE_RANGE, delete, timeout_s=SETUP_TIMEOUT_S)


def write_flags(function: F) -> F:
    """Return the flags of measurements that write."""
    function = writes(function)
    options = (
        number("--key-size", 8, 1, "size of a key in bytes"),
        number("--val-size", 256, 0, "size of a value in bytes"),
        number("--key-space-size", 10_000, 1, "number of different keys"),
    )
    for option in reversed(options):
        function = option(function)
    return function


def run_load(
    name: str,
    make: Callable[..., Load],
    requests: MakeRequests = lambda rank: iter(()),
    *,
    endpoints: str,
    clients: int,
    conns: int,
    processes: int,
    total: int,
    target_leader: bool,
    seed: int,
    as_json: bool,
) -> None:
    """Measure and print; failures end the program in one line. Further arguments are the values of ``shared_flags``.

    Arguments:
        name: of the measurement.
        make: ``Load``, or a subclass.
        requests: what to send.
    """
    with failures_in_one_line():
        members = choose_members(endpoints, target_leader)
        with call_bar(total, hidden=as_json) as on_progress:

            def share(rank: int, on_progress: Callable[[int], None]) -> Load:
                """The clients of one process: an equal share, and each begins with another member."""
                return make(
                    members[rank % len(members) :] + members[: rank % len(members)],
                    clients=max(1, clients // processes + (rank < clients % processes)),
                    connections=max(1, conns // processes),
                    options=client_options(),
                    on_progress=on_progress,
                )

            if processes > 1:
                result = run_in_processes(share, requests, total, processes, on_progress)
            else:
                result = asyncio.run(share(0, on_progress).run(requests(0), total=total))
    print_result(name, result, as_json)
    end(result, failed=not result.latencies_s)


def end(result: Result, *, failed: bool) -> None:
    """Leave with the exit code of a measurement that was interrupted or failed; do nothing after a good one.

    Arguments:
        result: of the measurement.
        failed: calls that failed.
    """
    if result.interrupted:
        raise click.exceptions.Exit(CTRL_C)
    if failed:
        raise click.exceptions.Exit(1)


@contextmanager
def failures_in_one_line() -> Iterator[None]:
    """Turn what can go wrong with a cluster into click's one line."""
    try:
        yield
    except (RaftKVError, RpcError, OSError) as error:
        raise click.ClickException(str(error)) from None


def choose_members(endpoints: str, target_leader: bool) -> list[str]:
    """Return the endpoints of a measurement.

    Arguments:
        endpoints: as given.
        target_leader: the leader's alone.
    """
    members = endpoints.split(",")
    return [asyncio.run(find_leader(members))] if target_leader else members


@contextmanager
def call_bar(total: int, *, hidden: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar of calls on a terminal inside the block; yields a function of the number of answered calls."""
    with progress_bar("calls", ("MofNComplete", "TimeRemaining"), total, hidden=hidden) as update:
        yield lambda answered: update(completed=answered)


def print_result(name: str, result: Result, as_json: bool) -> None:
    """Print rate and latencies, for people or as one JSON object.

    Arguments:
        name: of the measurement.
        result: of it.
        as_json: one JSON object.
    """
    summary = result.summary()
    if as_json:
        click.echo(json.dumps({"name": name, **summary}))
        return
    note = " (interrupted)" if result.interrupted else ""
    click.echo(f"{name}: {summary['rate']:,.0f}/s, {summary['calls']:,} calls in {summary['seconds']:.2f} s{note}")
    latencies = "  ".join(f"p{percent} {summary[f'p{percent}_ms']:.2f} ms" for percent in (50, 90, 99))
    click.echo(f"  {latencies}  generator {summary['generator_us']:.0f} us of processor time a call")
    for text, count in result.errors.most_common(5):
        click.echo(f"  {count} failed: {text}")


async def find_leader(endpoints: list[str]) -> str:
    """Return the endpoint whose member leads."""
    async with Client(endpoints, client_options()) as client:
        for endpoint in endpoints:
            status = await client.call_at(endpoint, methods.STATUS, rpc_pb2.StatusRequest(), timeout_s=SETUP_TIMEOUT_S)
            if status.leader == status.header.member_id:
                return endpoint
    raise RaftKVError("none of the endpoints is the leader")
