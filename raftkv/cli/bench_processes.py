"""Load from several processes at once: one Python process is busy long before a fast cluster is.

The parent forks before it has threads or a loop; each child connects, waits for the others, makes its share of the
calls, and sends its measurement back through a pipe. A child that fails sends the reason instead. Ctrl-C reaches the
parent alone, which passes it on once; children then send what they have measured until then.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from threading import Barrier, BrokenBarrierError
from typing import Any

from raftkv.cli.bench_load import LoadError, Request, Result, Runnable
from raftkv.errors import RaftKVError
from raftkv.rpc.status import RpcError

START_TIMEOUT_S = 60.0

MakeLoad = Callable[[int, Callable[[int], None]], Runnable]
"""Makes the clients of one process, given its rank and what is told how many calls are answered."""

MakeRequests = Callable[[int], Iterator[Request]]
"""Makes the requests of one process, given its rank."""


PROGRESS_S = 0.2


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
    children = []
    for rank in range(processes):
        share = total // processes + (rank < total % processes)
        receiver, sender = context.Pipe(duplex=False)
        arguments = (make_load, make_requests, rank, share, barrier, sender, answered)
        child = context.Process(target=_run_child, args=arguments, daemon=True)
        child.start()
        sender.close()
        children.append((child, receiver))
    receivers = [receiver for _, receiver in children]
    with _passing_on_signals([child for child, _ in children]):
        while any(not receiver.poll() for receiver in receivers):
            wait([receiver for receiver in receivers if not receiver.poll()], PROGRESS_S)
            on_progress(sum(answered))
        answers = [_receive(receiver) for receiver in receivers]
    for child, _ in children:
        child.join()
    return Result.merged(answers)


@contextmanager
def _passing_on_signals(children: list[Any]) -> Iterator[None]:
    """The first SIGINT or SIGTERM goes to the children; a second one ends this process."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]

    def pass_on(number: int, frame: object) -> None:
        restore()
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGINT)

    def restore() -> None:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)

    for number in numbers:
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
    leave_terminal()

    def on_progress(count: int) -> None:
        answered[rank] = count

    try:
        result = asyncio.run(_measure(make_load(rank, on_progress), make_requests(rank), total, barrier))
    except (RaftKVError, RpcError, OSError, BrokenBarrierError, KeyboardInterrupt) as error:
        barrier.abort()
        sender.send_bytes(b"e")
        interrupted = isinstance(error, KeyboardInterrupt)
        sender.send_bytes((str(error) or ("interrupted" if interrupted else "another load process failed")).encode())
        return
    sender.send_bytes(b"r")
    sender.send_bytes(result.to_bytes())


def leave_terminal() -> None:
    """In a child: a Ctrl-C in the terminal is the parent's to pass on. It goes with its parent's pipe."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


async def _measure(load: Runnable, requests: Iterator[Request], total: int, barrier: Barrier) -> Result:
    return await load.run(requests, total=total, when_connected=lambda: barrier.wait(START_TIMEOUT_S))
