"""A pass goes on for callers who were answered a moment ago: what they ask for is worked on together."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack

from raftkv.loop.cork import Cork
from raftkv.rpc.sockets import GATHER_S, PASS_S, QUIET_S, READ, EpollPoller
from tests.rpc.loop import until

LOOK_S = 1e-6
"""What a look at the test's clock takes."""


class Peer:
    """Whose connection has something to say. The next one has when this one is served, as of callers whose client is
    one process.
    """

    def __init__(self, callers: Callers, number: int) -> None:
        self.near, self.far = socket.socketpair()
        self._callers = callers
        self._number = number

    def on_readable(self) -> None:
        self.near.recv(1)
        self._callers.serve(self._number)

    def on_writable(self) -> None:
        raise AssertionError("it is not watched for that")


class Callers:
    """Callers of a server, and what its node has to do for them.

    Arguments:
        expected: how many callers were answered a moment ago.
        served_s: what it takes to serve one.
        are_callers: False: what comes is not for the node's log, such as an answer of another member.

    Attributes:
        turns: who was worked on together, in order.
    """

    def __init__(self, expected: int, *, served_s: float = 0.0, are_callers: bool = True) -> None:
        self.cork = Cork()
        self.cork.expect(expected)
        self.turns: list[list[int]] = []
        self.now = 0.0
        self._served_s = served_s
        self._are_callers = are_callers
        self._gathered: list[int] = []
        self._peers: list[Peer] = []

    def clock(self) -> float:
        self.now += LOOK_S
        return self.now

    def serve(self, number: int) -> None:
        self.now += self._served_s
        if self._are_callers:
            self.cork.arrived()
        if not self._gathered:
            assert self.cork.defer(self._turn)
        self._gathered.append(number)
        if number + 1 < len(self._peers):
            self._peers[number + 1].far.send(b"x")

    def _turn(self) -> None:
        self.turns.append(self._gathered)
        self._gathered = []

    async def come(self, count: int) -> None:
        """Have so many come, each as soon as the one before is served."""
        loop = asyncio.get_running_loop()
        poller = EpollPoller(loop, self.cork, self.clock)
        with ExitStack() as stack:
            self._peers = [Peer(self, number) for number in range(count)]
            for peer in self._peers:
                stack.enter_context(peer.near)
                stack.enter_context(peer.far)
                poller.watch(peer.near.fileno(), peer, READ)
            self._peers[0].far.send(b"x")
            await until(lambda: sum(map(len, self.turns)) == count)
            for peer in self._peers:
                poller.watch(peer.near.fileno(), peer, 0)
        poller.close()


async def test_those_who_are_expected_are_worked_on_together() -> None:
    callers = Callers(expected=5)
    await callers.come(5)
    assert callers.turns == [[0, 1, 2, 3, 4]]
    assert not callers.cork.awaits_more


async def test_no_pass_waits_for_more_than_are_expected() -> None:
    callers = Callers(expected=2)
    await callers.come(4)
    assert callers.turns == [[0, 1], [2], [3]]


async def test_gathering_waits_once_and_briefly_for_a_missing_caller() -> None:
    callers = Callers(expected=9)
    await callers.come(1)
    assert callers.turns == [[0]]
    assert QUIET_S < callers.now < QUIET_S + 20 * LOOK_S
    callers.cork.arrived()
    assert not callers.cork.awaits_more


async def test_callers_who_come_one_after_the_other_for_long_are_worked_on_meanwhile() -> None:
    callers = Callers(expected=100, served_s=0.3 * GATHER_S)
    await callers.come(12)
    assert callers.turns[0] == [0, 1, 2, 3, 4], "the first was not waited for"
    assert all(len(turn) <= 5 for turn in callers.turns)
    assert 5 * 0.3 * GATHER_S < PASS_S


async def test_input_without_a_caller_does_not_wait() -> None:
    callers = Callers(expected=5, are_callers=False)
    await callers.come(3)
    assert callers.turns == [[0], [1], [2]]
    callers.cork.arrived()
    assert callers.cork.awaits_more, "they are still expected"
