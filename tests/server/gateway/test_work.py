"""Cost of request bodies: a turn of the loop reads few of them, and each in small steps."""

from __future__ import annotations

import asyncio
import json
import sys
import tracemalloc
from collections.abc import Iterator
from types import FrameType
from typing import Any, cast

import pytest

from raftkv.loop.fair import MEMBER
from raftkv.loop.scheduler import Slices
from raftkv.pb import rpc_pb2
from raftkv.pb.services import SERVICES
from raftkv.server.gateway.decoder import JsonError, Reader, Requests
from raftkv.server.gateway.exchange import Chunks

BODY_BYTES = 2 * 1024 * 1024
KEPT_MAX_BYTES = 10 * BODY_BYTES
PUT = SERVICES["etcdserverpb.KV"]["Put"]
TEXTS = {"escapes": b"\\n", "characters": b"\\u4e2d", "surrogates": b"\\ud800", "slashes": b"AAA\\/"}


def bodies() -> dict[str, bytes]:
    found = {name: b'{"key":"%b"}' % (one * (BODY_BYTES // len(one))) for name, one in TEXTS.items()}
    found["numbers"] = b'{"x":[%b]}' % b",".join([b"9" * 4299] * (BODY_BYTES // 4300))
    found["a number"] = b'{"lease":%b}' % (b"9" * BODY_BYTES)
    found["an enum"] = b'{"lease":"%b"}' % (b"\\t" * (BODY_BYTES // 2))
    return found


@pytest.mark.long
@pytest.mark.parametrize(("name", "body"), bodies().items(), ids=bodies())
def test_a_large_value_is_read_in_little_memory(name: str, body: bytes) -> None:
    del name
    text = ""
    tracemalloc.start()
    try:
        for _ in Reader(body).next(rpc_pb2.PutRequest):
            pass
    except JsonError as error:
        text = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert len(text) < 5000
    assert peak < KEPT_MAX_BYTES


def test_a_body_that_waits_for_its_turn_is_not_decoded() -> None:
    """250 waiting bodies of emojis, 1.9 MB each, took another 7.5 MB each, which were not counted."""
    body = '{"key":"%s"}' % ("\U0001f600" * (BODY_BYTES // 4))
    encoded = body.encode()
    tracemalloc.start()
    try:
        waiting = [Reader(encoded) for _ in range(10)]
        assert tracemalloc.get_traced_memory()[0] < BODY_BYTES
    finally:
        tracemalloc.stop()
    assert not any(reader.is_at_end for reader in waiting)


@pytest.mark.parametrize("text", ["QQ=%s", "QQ==%s", "QQ=%s=", "QUE=%sx", "%sQQ==", "Q%sQ"])
def test_no_line_is_run_for_each_character_of_a_text(text: str) -> None:
    """Line breaks within base64 are allowed, as many as fit."""

    def lines_run(breaks: int) -> int:
        count = 0

        def trace(frame: FrameType, event: str, _: object) -> object:
            nonlocal count
            count += event == "line"
            return trace

        body = json.dumps({"key": text % ("\n" * breaks)}).encode()
        sys.settrace(trace)
        try:
            for _ in Reader(body).next(rpc_pb2.PutRequest):
                pass
        except JsonError:
            pass
        finally:
            sys.settrace(None)
        return count

    lines_run(1000)  # what is made at first use
    assert lines_run(2000) - lines_run(1000) < 1000 / 20, "one for tens"


async def test_a_turn_reads_few_of_the_bodies_that_came_together() -> None:
    slices = Slices()
    body = b'{"key":"YQ==","value":"%b"}' % (b"QUFB" * (BODY_BYTES // 4 - 100))
    turns: list[int] = [0]
    done_in: list[int] = []

    def next_turn() -> None:
        turns[0] += 1
        if len(done_in) < 30:
            asyncio.get_running_loop().call_soon(next_turn)

    async def read() -> None:
        await Requests(body, slices, b"alice").next(PUT)
        done_in.append(turns[0])

    next_turn()
    await asyncio.gather(*[read() for _ in range(30)])
    assert max(done_in.count(turn) for turn in set(done_in)) <= 10


@pytest.mark.parametrize("kind", ["body", "answer"])
async def test_flood_of_one_client_delays_no_other_and_not_the_member(kind: str) -> None:
    slices, served = Slices(), list[str | bytes]()
    body = b'{"key":"YQ==","value":"%b"}' % (b"QUFB" * 50_000)

    async def work(queue: str | bytes) -> None:
        if kind == "body":
            await Requests(body, slices, queue).next(PUT)
        else:
            await Chunks((" " * 10 for _ in range(10_000)), slices, queue).next()
        served.append(queue)

    def own() -> Iterator[None]:
        for _ in range(100):
            yield
        served.append(MEMBER)

    flood = [asyncio.create_task(work("address 10.0.0.0/24")) for _ in range(300)]
    await asyncio.sleep(0)
    slices.run(cast(Any, own), lambda error: None, 1, MEMBER)
    await asyncio.gather(work(b"alice"), *flood)
    assert max(served.index(b"alice"), served.index(MEMBER)) < 100
