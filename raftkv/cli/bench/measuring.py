"""What the measurements of ``raftkvctl bench`` share: members and keys, processes that make load, printed results."""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, Final

from raftkv.cli.bench.load import PREFIX, Load, LoadError, Request, Result
from raftkv.cli.command import Invocation
from raftkv.cli.ctl.session import Session, open_library, remark
from raftkv.cli.program import CTRL_C, ERROR, CommandError, refused
from raftkv.cli.table import progress_bar
from raftkv.client import Client
from raftkv.client.rpc import methods
from raftkv.client.scope import prefix_end
from raftkv.errors import RaftKVError
from raftkv.pb import rpc_pb2
from raftkv.rpc.status import RpcError

# -- processes ------------------------------------------------------------------------------------------------------
#
# Load from several processes at once: one Python process is busy long before a fast cluster is.
#
# The parent forks before it has threads or a loop; each child connects, says so, waits for its parent's word, and
# sends its measurement back through a pipe. A child that fails sends the reason instead. Ctrl-C reaches the parent
# alone, which passes it on once; children then send what they have measured until then. Signals are held back while
# processes are forked, so that none comes before its handler is there.

PROGRESS_S: Final = 0.2
_NUMBERS: Final = (signal.SIGINT, signal.SIGTERM)


class Child:
    """A process that measures; made inside ``signals_held_back``.

    Arguments:
        work: what it does; given its end of the pipe, returns its answer.
    """

    def __init__(self, work: Callable[[Connection], Awaitable[object]]) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_run_child, args=(work, other), daemon=True)
        self.process.start()
        other.close()

    def receive(self) -> Any:
        """Wait for what it sends.

        Raises:
            LoadError: it could not measure.
        """
        try:
            answer = self.pipe.recv()
        except EOFError:
            raise LoadError("a process of the measurement ended without an answer") from None
        if isinstance(answer, LoadError):
            raise answer
        return answer

    def stop(self) -> None:
        """Kill the process, unless it has ended."""
        self.process.kill()
        self.process.join()


@contextmanager
def signals_held_back() -> Iterator[None]:
    """SIGINT and SIGTERM wait until the end of the block; in a child that is forked in it, for ``_run_child``."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _NUMBERS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run_child(work: Callable[[Connection], Awaitable[object]], pipe: Connection) -> None:
    """Work until the answer, or until the parent is gone.

    Ctrl-C of the terminal does not come here: the parent passes it on, and it is heard once there is a loop. While a
    loop is made, an interrupt would leave half a one, and its traceback.
    """
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))

    async def heard() -> object:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _NUMBERS)
        return await work(pipe)

    answer: object = LoadError("interrupted")
    with suppress(KeyboardInterrupt):
        try:
            answer = asyncio.run(heard())
        except* (RaftKVError, RpcError, OSError, EOFError) as group:
            answer = LoadError(str(group.exceptions[0]) or "a process could not begin in time")
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the answer leaves whole
    with suppress(BrokenPipeError):  # the parent was killed
        pipe.send(answer)


def run_in_processes(
    make_load: Callable[[int, Callable[[int], None]], Load],
    make_requests: Callable[[int], Iterator[Request]],
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
    answered = multiprocessing.get_context("fork").Array("q", processes, lock=False)

    async def measure(rank: int, pipe: Connection) -> Result:
        load = make_load(rank, lambda count: answered.__setitem__(rank, count))
        share = total // processes + (rank < total % processes)
        return await load.run(make_requests(rank), total=share, when_connected=lambda: _await_word(pipe))

    with ExitStack() as stack:
        with signals_held_back():
            children = [Child(partial(measure, rank)) for rank in range(processes)]
            for child in children:
                stack.callback(child.stop)
            stack.enter_context(_passing_on_signals(children))
        for child in children:
            child.receive()
        for child in children:
            child.pipe.send("begin")
        pipes = [child.pipe for child in children]
        while waiting := [pipe for pipe in pipes if not pipe.poll()]:
            wait(waiting, PROGRESS_S)
            on_progress(sum(answered))
        return Result.merged([child.receive() for child in children])


def _await_word(pipe: Connection) -> None:
    pipe.send("ready")
    pipe.recv()


@contextmanager
def _passing_on_signals(children: list[Child]) -> Iterator[None]:
    """The first SIGINT or SIGTERM goes to the children; a second one ends this process."""
    before = [signal.getsignal(number) for number in _NUMBERS]

    def pass_on(number: int, frame: object) -> None:
        restore()
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child.process.pid or 0, signal.SIGINT)

    def restore() -> None:
        for number, handler in zip(_NUMBERS, before, strict=True):
            signal.signal(number, handler)

    for number in _NUMBERS:
        signal.signal(number, pass_on)
    try:
        yield
    finally:
        restore()


# -- measurements ---------------------------------------------------------------------------------------------------


class Bench:
    """One measurement.

    Arguments:
        invocation: its words.

    Attributes:
        session: of the command.
        as_json: whether JSON is wanted.
        members: endpoints to measure.
        token: of the user; empty without one.
    """

    def __init__(self, invocation: Invocation) -> None:
        gc.enable()  # a measurement runs for long
        self._invocation = invocation
        self.session, self.as_json = open_library(invocation)
        self.members = self.session.endpoints
        self.token = fetch_token(self.session)

    def __getitem__(self, flag: str) -> Any:
        return self._invocation[flag]

    def load(self, make: Callable[..., Load], members: list[str], **more: Any) -> Load:
        """Make the clients of one process: what ``make`` makes, as the user of the session."""
        return make(members, options=self.session.options, token=self.token, **more)

    def members_of(self, rank: int) -> list[str]:
        """Return the members to which a process of that rank connects, in turn: each begins with another one."""
        first = rank % len(self.members)
        return self.members[first:] + self.members[:first]

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Let a measurement write below ``PREFIX``: it says so first, and its keys are deleted afterwards."""
        self.session.run(lambda client: _delete_keys(client, self.session, limit=0))  # no cluster: that is said first
        keeps, prefix = self["keep-keys"], PREFIX.decode()
        if not self.as_json:
            end = "the keys stay" if keeps else "the keys are deleted at the end"
            remark(f"writes below {prefix}; {end}, their history is compacted later")
        try:
            yield
        finally:
            if not keeps:
                try:
                    self.session.run(lambda client: _delete_keys(client, self.session))
                except CommandError as error:  # what the measurement itself says stays the last line
                    remark(f"the keys below {prefix} were not deleted: {error}")

    def run(
        self,
        name: str,
        requests: Callable[[int], Iterator[Request]] = lambda rank: iter(()),
        make: Callable[..., Load] = Load,
        *,
        is_strict: bool = False,
    ) -> None:
        """Measure and print.

        Arguments:
            name: of the measurement.
            requests: what a process of a rank sends.
            make: ``Load``, or what makes one like it.
            is_strict: whether one failed call is a failure; else all are.

        Raises:
            CommandError: it failed, or was interrupted.
        """
        processes, total = self["processes"], self["total"]

        def share(rank: int, on_progress: Callable[[int], None]) -> Load:
            clients = max(1, self["clients"] // processes + (rank < self["clients"] % processes))
            sizes = {"clients": clients, "connections": max(1, self["conns"] // processes)}
            return self.load(make, self.members_of(rank), **sizes, on_progress=on_progress)

        with refused(FAILURES), call_bar(total, hidden=self.as_json) as on_progress:
            if processes > 1:
                result = run_in_processes(share, requests, total, processes, on_progress)
            else:
                result = asyncio.run(share(0, on_progress).run(requests(0), total=total))
        self._print(name, result)
        end(result, failed=bool(result.errors) if is_strict else not result.latencies_s)

    def _print(self, name: str, result: Result) -> None:
        """Print rate and latencies, for people or as one JSON object."""
        summary = result.summary()
        if self.as_json:
            print(json.dumps({"name": name, **summary}))
            return
        note = " (interrupted)" if result.interrupted else ""
        print(f"{name}: {summary['rate']:,.0f}/s, {summary['calls']:,} calls in {summary['seconds']:.2f} s{note}")
        latencies = "  ".join(f"p{percent} {summary[f'p{percent}_ms']:.2f} ms" for percent in (50, 90, 99))
        print(f"  {latencies}  generator {summary['generator_us']:.0f} us of processor time a call")
        for text, count in result.errors.most_common(5):
            print(f"  {count} failed: {text}")


async def _delete_keys(client: Client, session: Session, limit: int = 10_000) -> None:
    """Delete all keys of measurements, so many at a time; with none at a time it only asks whether they can be read."""
    end = prefix_end(PREFIX)
    while True:
        request = rpc_pb2.RangeRequest(key=PREFIX, range_end=end, limit=limit, keys_only=True, count_only=not limit)
        found = await client.call(methods.RANGE, request, timeout_s=session.timeout_s)
        if not found.kvs:
            return
        delete = rpc_pb2.DeleteRangeRequest(key=PREFIX, range_end=found.kvs[-1].key + b"\0")
        await client.call(methods.DELETE_RANGE, delete, timeout_s=session.timeout_s)


def fetch_token(session: Session) -> str:
    """Return the client's token: the load makes calls without the client, and needs it."""
    return session.run(lambda client: client.fetch_token(session.timeout_s))


def end(result: Result, *, failed: bool) -> None:
    """End a measurement that was interrupted or failed; do nothing after a good one.

    Arguments:
        result: of the measurement.
        failed: whether calls failed.

    Raises:
        CommandError: with the exit code, and without a line.
    """
    if result.interrupted or failed:
        raise CommandError("", CTRL_C if result.interrupted else ERROR)


FAILURES: Final = (RaftKVError, RpcError, OSError)
"""The errors by which a load can fail."""


@contextmanager
def call_bar(total: int, *, hidden: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar of calls on a terminal inside the block; yields a function of the number of answered calls."""
    with progress_bar("calls", ("MofNComplete", "TimeRemaining"), total, hidden=hidden) as update:
        yield lambda answered: update(completed=answered)
