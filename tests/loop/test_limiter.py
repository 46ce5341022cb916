"""Few of very many go on in a turn: in order within an identity, and each once; a failed one delays no other."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial

import pytest

from raftkv.loop.fair import MEMBER
from raftkv.loop.limiter import Limiter
from raftkv.rpc.server.http import HttpRequest, HttpResponse
from raftkv.rpc.server.server import HTTP_IN_A_TURN
from tests.rpc import raw
from tests.rpc import services as s
from tests.rpc.loop import until

IN_A_TURN = 10


async def _sizes(limiter: Limiter, called: list[int]) -> list[int]:
    """How many were called in each turn, from the next on, until none waits."""
    sizes: list[int] = []
    while len(limiter):
        before = len(called)
        await asyncio.sleep(0)
        sizes.append(len(called) - before)
    return sizes


async def test_callbacks_run_in_order_a_few_in_a_turn() -> None:
    limiter, called = Limiter(IN_A_TURN), list[int]()
    for number in range(35):
        limiter.add(partial(called.append, number), MEMBER)
    assert called == []
    assert await _sizes(limiter, called) == [10, 10, 10, 5]
    assert called == list(range(35))


async def test_the_first_of_many_are_called_at_once_unless_others_wait() -> None:
    limiter, called = Limiter(IN_A_TURN), list[int]()
    limiter.begin(partial(called.append, number) for number in range(15))
    assert called == list(range(10))
    limiter.begin(partial(called.append, number) for number in range(15, 25))
    assert called == list(range(10))
    assert await _sizes(limiter, called) == [10, 5]
    assert called == list(range(25))


async def test_a_callback_is_called_once_until_it_is_added_again() -> None:
    limiter, called = Limiter(IN_A_TURN), list[int]()
    again = partial(called.append, 1)
    for _ in range(3):
        limiter.add(again, MEMBER)
    assert await _sizes(limiter, called) == [1]
    limiter.add(again, MEMBER)
    assert await _sizes(limiter, called) == [1]


async def test_callback_added_by_a_callback_waits_for_the_next_turn() -> None:
    limiter, called = Limiter(IN_A_TURN), list[int]()
    limiter.begin([lambda: limiter.add(partial(called.append, 1), MEMBER)])
    assert called == []
    assert await _sizes(limiter, called) == [1]


async def test_cleared_callback_is_not_called() -> None:
    limiter, called = Limiter(IN_A_TURN), list[int]()
    limiter.begin([partial(called.append, 1), limiter.clear, partial(called.append, 2)])
    assert called == [1]
    limiter.add(partial(called.append, 3), MEMBER)
    limiter.clear()
    await asyncio.sleep(0)
    assert called == [1]
    limiter.add(partial(called.append, 4), MEMBER)
    assert await _sizes(limiter, called) == [1]


async def test_others_are_called_though_one_has_failed() -> None:
    limiter, called, failures = Limiter(IN_A_TURN), list[int](), list[str]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(str(context["exception"])))

    def fail() -> None:
        raise ValueError("failed")

    for callback in (partial(called.append, 1), fail, partial(called.append, 2)):
        limiter.add(callback, MEMBER)
    assert await _sizes(limiter, called) == [1, 1]
    assert (called, failures) == ([1, 2], ["failed"])


MANY = 100


async def test_cancelled_callers_leave_the_line() -> None:
    limiter = Limiter(1)
    assert limiter.try_enter()
    waiting = [asyncio.create_task(limiter.enter(1, b"mallory")) for _ in range(1000)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert len(limiter) == 0


async def test_so_many_enter_in_a_turn_in_the_order_in_which_they_came() -> None:
    limiter, entered = Limiter(IN_A_TURN), list[int]()

    async def enter(number: int) -> None:
        if not limiter.try_enter():
            await limiter.enter(1, MEMBER)
        entered.append(number)

    tasks = [asyncio.create_task(enter(number)) for number in range(MANY)]
    await asyncio.sleep(0)
    assert len(limiter) == MANY - IN_A_TURN
    for task in tasks[2 * IN_A_TURN : 5 * IN_A_TURN]:
        task.cancel()
    before = len(entered)
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        assert len(entered) - before <= IN_A_TURN
        before = len(entered)
    assert entered == [number for number in range(MANY) if not 2 * IN_A_TURN <= number < 5 * IN_A_TURN]
    assert len(limiter) == 0


async def test_newcomer_enters_when_the_last_waiters_go_on() -> None:
    for turns_later in range(6):
        limiter = Limiter(1)
        assert limiter.try_enter()
        waiting = asyncio.create_task(limiter.enter(1, MEMBER))
        for _ in range(turns_later):
            await asyncio.sleep(0)
        await limiter.enter(1, MEMBER)
        await waiting


async def test_large_request_takes_many_places_and_keeps_its_turn() -> None:
    limiter, entered = Limiter(IN_A_TURN), list[int]()
    weights = [1, 1, 3 * IN_A_TURN, 4, 4, 4, 1, 9, 1]

    async def enter(number: int) -> None:
        if not limiter.try_enter(weights[number]):
            await limiter.enter(weights[number], MEMBER)
        entered.append(number)

    tasks = [asyncio.create_task(enter(number)) for number in range(len(weights))]
    turns = []
    while not all(task.done() for task in tasks):
        before = len(entered)
        await asyncio.sleep(0)
        turns.append(entered[before:])
    assert [turn for turn in turns if turn] == [[0, 1, 2], [3, 4, 5], [6, 7], [8]]


@pytest.mark.parametrize(
    ("target", "in_a_turn"), [("/x", HTTP_IN_A_TURN), ("/x?" + "&a" * 4_000, 2)], ids=["short", "long"]
)
async def test_plain_requests_of_either_version_are_begun_a_few_in_a_turn(target: str, in_a_turn: int) -> None:
    """Fewer, if they have much to look at: to read 64 queries of 32 KB took 0.4 s."""
    turn, begun = 0, Counter[int]()
    loop = asyncio.get_running_loop()

    def next_turn() -> None:
        nonlocal turn
        turn += 1
        if begun.total() < 2 * MANY:
            loop.call_soon(next_turn)

    async def handle(request: HttpRequest) -> HttpResponse:
        begun[turn] += 1
        return HttpResponse(200, b"")

    loop.call_soon(next_turn)
    async with s.echo_server(http_handler=handle) as echo:
        client = await raw.RawClient.connect(echo.target)
        fields = ((b":method", b"GET"), (b":scheme", b"http"), (b":path", target.encode()), (b":authority", b"x"))
        streams = range(1, 2 * MANY, 2)
        client.send(b"".join(raw.headers(one, fields, raw.END_HEADERS | raw.END_STREAM) for one in streams))
        host, _, port = echo.target.rpartition(":")
        others = [await asyncio.open_connection(host, int(port)) for _ in range(MANY)]
        for _, writer in others:
            writer.write(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        await until(lambda: begun.total() == 2 * MANY)
        for _, writer in others:
            writer.close()
        client.close()
    assert max(begun.values()) <= 2 * in_a_turn  # the counter of turns may tick between two of the limiter


@pytest.mark.parametrize("flood", [2 * IN_A_TURN, 100 * IN_A_TURN])
async def test_a_flood_of_one_identity_delays_another_by_a_turn(flood: int) -> None:
    limiter, called = Limiter(IN_A_TURN), list[str]()
    for number in range(flood):
        limiter.add(partial(called.append, f"mallory {number}"), b"mallory")
    await asyncio.sleep(0)
    assert len(called) == IN_A_TURN
    limiter.add(partial(called.append, "bob"), b"bob")
    alice = asyncio.create_task(limiter.enter(3, b"alice"))
    for _ in range(4):
        await asyncio.sleep(0)
    assert alice.done()
    assert called.index("bob") < 2 * IN_A_TURN
    limiter.clear()
