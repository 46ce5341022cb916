"""A few callbacks are called in each turn, in their order, each once; what fails keeps nobody waiting."""

from __future__ import annotations

import asyncio
from functools import partial

from raftkv.loop.limiter import Limiter
from tests.rpc.loop import on_loop

IN_A_TURN = 10


async def _sizes(paced: Limiter, called: list[int]) -> list[int]:
    """How many were called in each turn, from the next on, until none waits."""
    sizes: list[int] = []
    while len(paced):
        before = len(called)
        await asyncio.sleep(0)
        sizes.append(len(called) - before)
    return sizes


@on_loop
async def test_what_is_added_is_called_in_its_order_a_few_in_a_turn() -> None:
    paced, called = Limiter(IN_A_TURN), list[int]()
    for number in range(35):
        paced.add(partial(called.append, number))
    assert called == []
    assert await _sizes(paced, called) == [10, 10, 10, 5]
    assert called == list(range(35))


@on_loop
async def test_the_first_of_many_are_called_at_once_unless_others_wait() -> None:
    paced, called = Limiter(IN_A_TURN), list[int]()
    paced.begin(partial(called.append, number) for number in range(15))
    assert called == list(range(10))
    paced.begin(partial(called.append, number) for number in range(15, 25))
    assert called == list(range(10))
    assert await _sizes(paced, called) == [10, 5]
    assert called == list(range(25))


@on_loop
async def test_a_callback_is_called_once_until_it_is_added_again() -> None:
    paced, called = Limiter(IN_A_TURN), list[int]()
    again = partial(called.append, 1)
    for _ in range(3):
        paced.add(again)
    assert await _sizes(paced, called) == [1]
    paced.add(again)
    assert await _sizes(paced, called) == [1]


@on_loop
async def test_what_a_callback_adds_waits_for_the_next_turn() -> None:
    paced, called = Limiter(IN_A_TURN), list[int]()
    paced.begin([lambda: paced.add(partial(called.append, 1))])
    assert called == []
    assert await _sizes(paced, called) == [1]


@on_loop
async def test_what_is_cleared_is_not_called() -> None:
    paced, called = Limiter(IN_A_TURN), list[int]()
    paced.begin([partial(called.append, 1), paced.clear, partial(called.append, 2)])
    assert called == [1]
    paced.add(partial(called.append, 3))
    paced.clear()
    await asyncio.sleep(0)
    assert called == [1]
    paced.add(partial(called.append, 4))
    assert await _sizes(paced, called) == [1]


@on_loop
async def test_others_are_called_though_one_has_failed() -> None:
    paced, called, failures = Limiter(IN_A_TURN), list[int](), list[str]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(str(context["exception"])))

    def fail() -> None:
        raise ValueError("failed")

    for callback in (partial(called.append, 1), fail, partial(called.append, 2)):
        paced.add(callback)
    assert await _sizes(paced, called) == [1, 1]
    assert (called, failures) == ([1, 2], ["failed"])
