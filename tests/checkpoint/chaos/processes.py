"""Ranks as processes: forked from a server that has imported everything, kept in reserve, killed, frozen and thawed.

    pool = Pool("registry", endpoints)
    generation = Generation([pool.take(), pool.take()])
    generation.start("save", lambda rank: (step, rank, 2, ""))
    generation.until_ended()

Each rank executes one command at a time, and answers ``done`` or ``failed``; in between it may say that it stands at
its point.
"""

from __future__ import annotations

import itertools
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection, get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.checkpoint.chaos.points import AT, DONE, FAILED, GO, READY, Points

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 120.0
REGISTRY = "registry"
DCP = "dcp"
DCP_ASYNC = "dcp-async"
MEMORY = "memory"
WITH_TORCH = (DCP, DCP_ASYNC)
_PRELOAD = ["tests.checkpoint.chaos.registry_ranks", "tests.checkpoint.chaos.points"]
_number = itertools.count(1)


class Stuck(Exception):
    """A rank has not answered in time."""


def serve(link: connection.Connection, kind: str, options: Any) -> None:
    """Do what the driver says until it hangs up: the main function of a rank."""
    threading.Thread(target=_end_with, args=(link.fileno(),), daemon=True).start()
    rank = _make(kind, Points(link), options)
    link.send((READY, None))
    while True:
        try:
            name, arguments = link.recv()
        except (EOFError, OSError):
            os._exit(0)
        try:
            answer = (DONE, getattr(rank, name)(*arguments))
        except Exception as error:  # the driver has to know of every error
            answer = (FAILED, (type(error).__name__, str(error)))
        link.send(answer)


def _end_with(descriptor: int) -> None:
    """End this process with the driver, also in the middle of a command."""
    poller = select.poll()
    poller.register(descriptor, 0)  # hanging up is always told
    poller.poll()
    os._exit(0)


def _make(kind: str, stops: Points, options: Any) -> Any:
    if kind == MEMORY:
        from tests.checkpoint.chaos.memory_nodes import MemoryNode

        return MemoryNode(stops, options)
    if kind in WITH_TORCH:
        from tests.checkpoint.chaos.dcp_ranks import DcpRank

        return DcpRank(stops, options, is_async=kind == DCP_ASYNC)
    from tests.checkpoint.chaos.registry_ranks import RegistryRank

    return RegistryRank(stops, options)


@dataclass(eq=False)
class Rank:
    """One process, as the driver sees it.

    Attributes:
        at: the point at which it stands; empty: none.
        answer: to the last command; None: it is still at it.
    """

    process: ForkServerProcess
    link: connection.Connection
    at: str = ""
    answer: tuple[str, Any] | None = None
    is_dead: bool = False
    number: int = field(default_factory=lambda: next(_number))

    def start(self, name: str, *arguments: object) -> None:
        """Give it a command."""
        self.answer = None
        self.link.send((name, arguments))

    def call(self, name: str, *arguments: object) -> Any:
        """Give it a command that must succeed, and wait for what it returns.

        Raises:
            Stuck: it failed, or did not answer.
        """
        self.start(name, *arguments)
        pump([self], lambda: self.answer is not None)
        kind, value = self.answer or ("", None)
        if kind != DONE:
            raise Stuck(f"{name}: {value}")
        return value

    def go_on(self) -> None:
        """Let it leave its point."""
        self.at = ""
        self.link.send(GO)

    def kill(self) -> None:
        """`kill -9`."""
        if self.is_dead:
            return
        self.process.kill()
        self.process.join()
        self.link.close()
        self.is_dead = True

    def freeze(self) -> None:
        """Stop it (SIGSTOP)."""
        os.kill(self.process.pid or 0, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it run on."""
        os.kill(self.process.pid or 0, signal.SIGCONT)

    def take(self, message: tuple[str, Any]) -> None:
        """Note what it has said."""
        kind, value = message
        if kind == AT:
            self.at = value
        else:
            self.answer = (kind, value)


def pump(ranks: Iterable[Rank], until: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    """Take what ranks say, until something is so.

    Raises:
        Stuck: it is not so in time.
    """
    deadline = time.monotonic() + patience_s
    alive = {rank.link: rank for rank in ranks if not rank.is_dead}
    while not until():
        said = connection.wait(list(alive), max(0.0, deadline - time.monotonic()))
        if not said:
            raise Stuck(f"nothing within {patience_s:g} s from ranks that are {[rank.at or '?' for rank in ranks]}")
        for link in said:
            try:
                alive[link].take(link.recv())
            except EOFError:
                raise Stuck(f"rank process {alive[link].process.pid} ended by itself") from None


class Generation:
    """The ranks of one generation, rank 0 first."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self.ranks = list(ranks)

    @property
    def alive(self) -> list[Rank]:
        """Those that were not killed."""
        return [rank for rank in self.ranks if not rank.is_dead]

    def start(self, name: str, arguments: Callable[[int], tuple[object, ...]]) -> None:
        """Give all a command."""
        for number, rank in enumerate(self.ranks):
            rank.start(name, *arguments(number))

    def until_at(self, rank: Rank) -> None:
        """Wait until one stands at its point."""
        pump(self.alive, lambda: bool(rank.at))

    def call(self, name: str, arguments: Callable[[int], tuple[object, ...]] = lambda rank: ()) -> list[Any]:
        """Give all a command that must succeed, at the same time; returns what each answers.

        Raises:
            Stuck: it failed, or a rank did not answer.
        """
        self.start(name, arguments)
        self.until_ended()
        answers = [rank.answer or ("", None) for rank in self.ranks]
        if any(kind != DONE for kind, _ in answers):
            raise Stuck(f"{name}: {[value for kind, value in answers if kind != DONE]}")
        return [value for _, value in answers]

    def until_ended(self) -> None:
        """Wait until all that live have answered."""
        pump(self.alive, lambda: all(rank.answer is not None for rank in self.alive))


class Pool:
    """Processes that are ready to be ranks.

    Arguments:
        kind: what they run; see ``_make``.
        options: of it.
        reserve: how many are started ahead.
    """

    def __init__(self, kind: str, options: Any, reserve: int) -> None:
        self._kind = kind
        self._options = options
        self._reserve = reserve
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._context = get_context("forkserver")
        own = {MEMORY: "memory_nodes", DCP: "dcp_ranks", DCP_ASYNC: "dcp_ranks"}.get(kind, "points")
        self._context.set_forkserver_preload([*_PRELOAD, f"tests.checkpoint.chaos.{own}"])
        self._free: deque[Rank] = deque()
        self._all: list[Rank] = []
        self._fill()

    def take(self, count: int) -> list[Rank]:
        """Return ranks that are ready."""
        while len(self._free) < count:
            self._start_one()
        taken = [self._free.popleft() for _ in range(count)]
        pump(taken, lambda: all(rank.answer is not None for rank in taken))
        return taken

    def give_back(self, ranks: Sequence[Rank]) -> None:
        """Take back those that live, and start others in place of those that do not."""
        if self._kind in WITH_TORCH:  # a process that was in a torch group which broke is not used again
            for rank in ranks:
                rank.kill()
        self._free.extend(rank for rank in ranks if not rank.is_dead)
        self._all = [rank for rank in self._all if not rank.is_dead]
        self._fill()

    def _fill(self) -> None:
        while len(self._all) < self._reserve:
            self._start_one()

    def _start_one(self) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=serve, args=(theirs, self._kind, self._options), daemon=True)
        process.start()
        theirs.close()
        rank = Rank(process, ours)
        self._free.append(rank)
        self._all.append(rank)

    def close(self) -> None:
        """End all."""
        for rank in self._all:
            if not rank.is_dead:
                rank.kill()
        self._all, self._free = [], deque()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
