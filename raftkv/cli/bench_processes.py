"""Load from several processes at once: one Python process is busy long before a fast cluster is.

The parent forks before it has threads or a loop; each child connects, waits for the others, makes its share of the
calls, and sends its measurement back through a pipe. A child that fails sends the reason instead.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from threading import Barrier, BrokenBarrierError
from typing import Any

from raftkv.cli.bench_load import LoadError, Request, Result, Runnable
from raftkv.errors import RaftKVError
from raftkv.rpc.status import RpcError

START_TIMEOUT_S = 60.0

MakeLoad = Callable[[int], Runnable]
"""Makes the clients of one process, given its rank."""

MakeRequests = Callable[[int], Iterator[Request]]
"""Makes the requests of one process, given its rank."""


def run_in_processes(make_load: MakeLoad, make_requests: MakeRequests, total: int, processes: int) -> Result:
    """Make ``total`` calls from so many processes.

    Raises:
        LoadError: a process could not measure.
    """
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(processes)
    children = []
    for rank in range(processes):
        share = total // processes + (rank < total % processes)
        receiver, sender = context.Pipe(duplex=False)
        arguments = (make_load, make_requests, rank, share, barrier, sender)
        child = context.Process(target=_run_child, args=arguments, daemon=True)
        child.start()
        sender.close()
        children.append((child, receiver))
    answers = [_receive(receiver) for _, receiver in children]
    for child, _ in children:
        child.join()
    return Result.merged(answers)


def _receive(receiver: Connection) -> Result:
    try:
        kind, answer = receiver.recv_bytes(), receiver.recv_bytes()
    except EOFError:
        raise LoadError("a load process ended without an answer") from None
    if kind != b"r":
        raise LoadError(answer.decode())
    return Result.from_bytes(answer)


def _run_child(
    make_load: MakeLoad, make_requests: MakeRequests, rank: int, total: int, barrier: Any, sender: Connection
) -> None:
    try:
        result = asyncio.run(_measure(make_load(rank), make_requests(rank), total, barrier))
    except (RaftKVError, RpcError, OSError, BrokenBarrierError) as error:
        barrier.abort()
        sender.send_bytes(b"e")
        sender.send_bytes((str(error) or "another load process failed").encode())
        return
    sender.send_bytes(b"r")
    sender.send_bytes(result.to_bytes())


async def _measure(load: Runnable, requests: Iterator[Request], total: int, barrier: Barrier) -> Result:
    return await load.run(requests, total=total, when_connected=lambda: barrier.wait(START_TIMEOUT_S))
