"""Load from several processes at once: one Python process is busy long before a fast cluster is.

The parent forks before it has threads or a loop; each child connects, waits for the others, makes its share of the
calls, and sends its measurement back through a pipe. A child that fails sends the reason instead. Ctrl-C reaches the
parent alone, which passes it on once; children then send what they have measured until then. Signals are held back
while processes are forked, so that none comes before its handler is there.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection, wait
from threading import Barrier, BrokenBarrierError
from typing import Any

from raftkv.cli.bench.load import LoadError, Request, Result, Runnable
from raftkv.errors import RaftKVError
from raftkv.rpc.status import RpcError

START_TIMEOUT_S = 60.0

MakeLoad = Callable[[int, Callable[[int], None]], Runnable]
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


async def _measure(load: Runnable, requests: Iterator[Request], total: int, barrier: Barrier) -> Result:
    hear_parent()
    return await load.run(requests, total=total, when_connected=lambda: barrier.wait(START_TIMEOUT_S))
