"""Few of very many go on in a turn, in their order; who has gone keeps nobody out."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from raftkv.loop.limiter import Limiter
from raftkv.rpc.server.http import HttpRequest, HttpResponse
from raftkv.rpc.server.server import HTTP_IN_A_TURN
from tests.rpc import raw
from tests.rpc import services as s
from tests.rpc.loop import on_loop, until

IN_A_TURN = 10
MANY = 100


@on_loop
async def test_so_many_enter_in_a_turn_in_the_order_in_which_they_came() -> None:
    turnstile, entered = Limiter(IN_A_TURN), list[int]()

    async def enter(number: int) -> None:
        if not turnstile.try_enter():
            await turnstile.enter()
        entered.append(number)

    tasks = [asyncio.create_task(enter(number)) for number in range(MANY)]
    await asyncio.sleep(0)
    assert len(turnstile) == MANY - IN_A_TURN
    for task in tasks[2 * IN_A_TURN : 5 * IN_A_TURN]:
        task.cancel()
    before = len(entered)
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        assert len(entered) - before <= IN_A_TURN
        before = len(entered)
    assert entered == [number for number in range(MANY) if not 2 * IN_A_TURN <= number < 5 * IN_A_TURN]
    assert len(turnstile) == 0


@on_loop
async def test_who_comes_when_the_last_who_waited_go_on_gets_in_too() -> None:
    for turns_later in range(6):
        turnstile = Limiter(1)
        assert turnstile.try_enter()
        waiting = asyncio.create_task(turnstile.enter())
        for _ in range(turns_later):
            await asyncio.sleep(0)
        await turnstile.enter()
        await waiting


@on_loop
async def test_who_has_much_to_do_takes_the_room_of_many_and_keeps_its_place() -> None:
    turnstile, entered = Limiter(IN_A_TURN), list[int]()
    weights = [1, 1, 3 * IN_A_TURN, 4, 4, 4, 1, 9, 1]

    async def enter(number: int) -> None:
        if not turnstile.try_enter(weights[number]):
            await turnstile.enter(weights[number])
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
@on_loop
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
    assert max(begun.values()) <= 2 * in_a_turn  # the counter of turns may tick between two of the turnstile
