"""Watched sockets are served, a bounded number a turn, and no others."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from raftkv.loop.cork import Cork
from raftkv.loop.fair import Identity
from raftkv.rpc.sockets import EVENTS_A_PASS, PASS_S, READ, WRITE, EpollPoller, LoopPoller, open_poller
from tests.rpc.loop import until


class Owner:
    """Counts what it is called for."""

    def __init__(self, then: Callable[[], None] = lambda: None, identity: Identity = "") -> None:
        self.readable = 0
        self.writable = 0
        self._then = then
        self._identity = identity

    def queue(self) -> Identity:
        return self._identity

    def on_readable(self) -> None:
        self.readable += 1
        self._then()

    def on_writable(self) -> None:
        self.writable += 1
        self._then()


@contextmanager
def _pairs(count: int, poller: Any) -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    found = [socket.socketpair() for _ in range(count)]
    try:
        yield found
        for near, _ in found:
            poller.watch(near.fileno(), Owner(), 0)
        poller.close()
    finally:
        for near, far in found:
            near.close()
            far.close()


@pytest.mark.parametrize("kind", ["epoll", "loop"])
async def test_one_is_called_for_what_it_asked_for(kind: str) -> None:
    loop = asyncio.get_running_loop()
    poller: Any = EpollPoller(loop, Cork()) if kind == "epoll" else LoopPoller(loop)
    owner = Owner()
    with _pairs(1, poller) as [(near, far)]:
        poller.watch(near.fileno(), owner, READ)
        for _ in range(5):
            await asyncio.sleep(0)
        assert (owner.readable, owner.writable) == (0, 0)
        far.send(b"x")
        await until(lambda: owner.readable > 1)  # until it is read
        assert owner.writable == 0
        poller.watch(near.fileno(), owner, WRITE)
        seen = owner.readable
        await until(lambda: owner.writable > 1)
        assert owner.readable == seen
        poller.watch(near.fileno(), owner, READ | WRITE)
        before = (owner.readable, owner.writable)
        await until(lambda: owner.readable > before[0] and owner.writable > before[1])
        poller.watch(near.fileno(), owner, 0)
        before = (owner.readable, owner.writable)
        far.close()  # a broken connection is reported for any requested event
        for _ in range(5):
            await asyncio.sleep(0)
        assert (owner.readable, owner.writable) == before
        poller.watch(near.fileno(), owner, 0)


async def test_a_pass_serves_so_many_and_the_next_the_others() -> None:
    poller = EpollPoller(asyncio.get_running_loop(), Cork(), lambda: 0.0)
    count = EVENTS_A_PASS + 40
    turns: list[int] = []
    with _pairs(count, poller) as pairs:
        for near, far in pairs:
            far.send(b"x")
            owner = Owner(lambda near=near: (near.recv(1), turns.append(turn))[1])
            poller.watch(near.fileno(), owner, READ)
        turn = 0
        while len(turns) < count:
            turn += 1
            await asyncio.sleep(0)
        assert max(turns.count(each) for each in set(turns)) == EVENTS_A_PASS
        assert len(set(turns)) == 2


@pytest.mark.parametrize("flood", [20, EVENTS_A_PASS - 1])
async def test_an_identity_with_many_busy_sockets_delays_another_by_few_turns(flood: int) -> None:
    now, turn, served = 0.0, 0, list[int]()
    poller = EpollPoller(asyncio.get_running_loop(), Cork(), lambda: now)

    def busy() -> None:  # it never ends to have something to read
        nonlocal now
        now += 0.6 * PASS_S

    with _pairs(flood + 1, poller) as pairs:
        for near, far in pairs[:flood]:
            far.send(b"x")
            poller.watch(near.fileno(), Owner(busy, b"mallory"), READ)
        near, far = pairs[flood]
        poller.watch(near.fileno(), Owner(lambda: (near.recv(1), served.append(turn))[1], b"alice"), READ)
        for turn in range(20):
            if turn == 5:
                far.send(b"y")
            await asyncio.sleep(0)
        assert served, "in less turns than the flood takes"
        assert served[0] <= 8


async def test_a_pass_that_takes_long_ends_and_the_next_goes_on_with_who_was_left() -> None:
    now = 0.0
    poller = EpollPoller(asyncio.get_running_loop(), Cork(), lambda: now)
    served: list[tuple[int, int]] = []
    turn = 0

    def busy(number: int) -> None:  # it never ends to have something to read
        nonlocal now
        now += 0.4 * PASS_S
        served.append((turn, number))

    with _pairs(5, poller) as pairs:
        for number, (near, far) in enumerate(pairs):
            far.send(b"x")
            poller.watch(near.fileno(), Owner(lambda number=number: busy(number)), READ)
        while len(served) < 25:
            turn += 1
            await asyncio.sleep(0)
    numbers = [number for _, number in served]
    assert sorted(numbers[:5]) == [0, 1, 2, 3, 4], "the next pass begins with those left"
    counts = [[numbers[:at].count(number) for number in range(5)] for at in range(25)]
    assert all(max(count) - min(count) <= 2 for count in counts)
    turns = [at for at, _ in served]
    assert {turns.count(each) for each in set(turns)} <= {2, 3}


async def test_output_of_a_turn_leaves_when_all_were_served() -> None:
    order: list[str] = []
    cork = Cork()
    poller = EpollPoller(asyncio.get_running_loop(), cork)

    class Answer:
        def flush(self) -> None:
            order.append("flush")

    answer = Answer()
    with _pairs(2, poller) as pairs:
        for near, far in pairs:
            far.send(b"x")

            def serve(near: socket.socket = near) -> None:
                near.recv(1)
                if not order:
                    cork.mark(answer)
                order.append("served")

            poller.watch(near.fileno(), Owner(serve), READ)
        await until(lambda: len(order) == 3)
        assert order == ["served", "served", "flush"]


async def test_a_turn_that_those_served_made_due_runs_once_they_are_all_served() -> None:
    order: list[str] = []
    cork = Cork()
    poller = EpollPoller(asyncio.get_running_loop(), cork)
    with _pairs(2, poller) as pairs:
        for near, far in pairs:
            far.send(b"x")

            def serve(near: socket.socket = near) -> None:
                near.recv(1)
                order.append("served")
                if len(order) == 1:
                    assert cork.defer(lambda: order.append("turn"))

            poller.watch(near.fileno(), Owner(serve), READ)
        await until(lambda: len(order) == 3)
        assert order == ["served", "served", "turn"]


async def test_a_turn_waits_for_the_next_turn_of_the_loop_if_one_alone_took_long() -> None:
    now = 0.0
    order: list[str] = []
    loop = asyncio.get_running_loop()
    cork = Cork()
    poller = EpollPoller(loop, cork, lambda: now)
    with _pairs(1, poller) as [(near, far)]:
        far.send(b"x")

        def serve() -> None:
            nonlocal now
            now += 2 * PASS_S
            near.recv(1)
            assert cork.defer(lambda: order.append("turn"))
            loop.call_soon(order.append, "others")

        poller.watch(near.fileno(), Owner(serve), READ)
        await until(lambda: len(order) == 2)
        assert order == ["others", "turn"]


async def test_a_reader_removed_in_the_same_turn_is_not_called() -> None:
    loop = asyncio.get_running_loop()
    failures: list[object] = []
    loop.set_exception_handler(lambda loop, context: failures.append(context))
    poller = EpollPoller(loop, Cork())
    with _pairs(2, poller) as pairs:
        fds = [near.fileno() for near, _ in pairs]
        calls: list[int] = []

        def first_come(fd: int) -> None:
            calls.append(fd)
            for each in fds:
                poller.watch(each, Owner(), 0)

        for near, far in pairs:
            far.send(b"x")
            fd = near.fileno()
            poller.watch(fd, Owner(lambda fd=fd: first_come(fd)), READ)
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(calls) == 1
        assert failures == []


async def test_it_ends_with_the_last_that_is_watched() -> None:
    poller = EpollPoller(asyncio.get_running_loop(), Cork())
    owner = Owner()
    with _pairs(1, LoopPoller(asyncio.get_running_loop())) as [(near, far)]:
        poller.watch(near.fileno(), owner, READ)
        poller.close()
        far.send(b"last words")
        await until(lambda: owner.readable)
        poller.watch(near.fileno(), owner, 0)
        poller.close()
        with pytest.raises(ValueError, match="closed"):
            poller.watch(near.fileno(), Owner(), READ)


async def test_a_system_without_epoll_leaves_sockets_to_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(open_poller(loop, Cork()), EpollPoller)
    monkeypatch.delattr("select.epoll")
    assert isinstance(open_poller(loop, Cork()), LoopPoller)
