"""What answers take that are made and not sent, beside the bytes of their messages: their calls count as open."""

from __future__ import annotations

import pytest

from raftkv.rpc.server.core import CALL_BYTES, OPEN_CALLS_FREE
from tests.rpc import raw
from tests.rpc import services as s
from tests.rpc.attacks.test_answer_budget import CLOSED_WINDOWS
from tests.rpc.loop import until

CALLS = 100
COUNTED = CALL_BYTES * (CALLS - OPEN_CALLS_FREE)


def calls(path: str) -> bytes:
    """Calls with an empty message each."""
    fields = raw.grpc_headers(path)
    return b"".join(
        raw.headers(one, fields) + raw.message(one, bytes(5), raw.END_STREAM) for one in range(1, 2 * CALLS, 2)
    )


async def heads(client: raw.RawClient) -> None:
    """Wait for the headers of all answers."""
    found = 0
    while found < CALLS:
        found += (await client.next_frame())[0] == raw.HEADERS


async def test_calls_count_until_their_answers_have_left(echo: s.EchoServer) -> None:
    """A client that opens no window had a member keep 2,000 small answers a connection, and no budget counted them."""
    client = await raw.RawClient.connect(echo.target, CLOSED_WINDOWS)
    client.send(calls(s.UNARY))
    await heads(client)
    await until(lambda: echo.server.answers.held_bytes == COUNTED)
    client.send(raw.settings((4, 100)))
    await until(lambda: echo.server.answers.held_bytes == 0)
    client.close()


async def test_calls_do_not_count_once_they_are_answered(echo: s.EchoServer) -> None:
    """A client that says nothing after its answers held 8 KiB for each call of a burst, and was ended for it."""
    client = await raw.RawClient.connect(echo.target)
    client.send(calls(s.HANG))
    await until(lambda: len(echo.hanging) == CALLS and echo.server.answers.held_bytes == COUNTED)
    for call in echo.hanging:
        call.reply(b"")
    await until(lambda: echo.server.answers.held_bytes == 0)
    client.close()


@pytest.mark.parametrize(
    "fields",
    [((b"large", b"v" * 15_000),), tuple((b"x%d" % one, b"%d" % one) for one in range(110))],
    ids=["large", "many"],
)
async def test_the_header_of_a_call_counts_until_it_is_answered(echo, fields):
    """A call that waits keeps its header: 2,000 of 16 KB a connection were not counted."""
    client = await raw.RawClient.connect(echo.target)
    for one in range(1, 2 * CALLS, 2):
        client.send(raw.headers(one, raw.grpc_headers(s.HANG, *fields, (b"number", b"%d" % one))))
        client.send(raw.message(one, bytes(5), raw.END_STREAM))
    await until(lambda: len(echo.hanging) == CALLS)
    await until(lambda: echo.server.answers.held_bytes > COUNTED + CALLS * 15_000)
    for call in echo.hanging:
        call.reply(b"")
    await until(lambda: echo.server.answers.held_bytes == 0)
    client.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b":path", b"/" + b"\xff" * 3900),
        (b":path", b"/test.Echo/" + b"\xff" * 3900),
        (b":method", b"A" * 3900),
        (b"content-type", b"application/grpcs" + b"\xff" * 3900),
        (b"grpc-encoding", b"\xff" * 3900),
    ],
    ids=["service", "method", "HTTP method", "content type", "encoding"],
)
async def test_a_refusal_repeats_little_of_what_is_refused(echo: s.EchoServer, name: bytes, value: bytes) -> None:
    """An octet of HPACK can name 4 KB, each of which may be nine in a message that no handler reads."""
    fields = (*((key, found) for key, found in raw.GRPC_HEADERS if key != name), (name, value))
    fields = tuple(sorted(fields, key=lambda field: not field[0].startswith(b":")))
    client = await raw.RawClient.connect(echo.target)
    client.send(raw.headers(1, fields, raw.END_HEADERS | raw.END_STREAM))
    _, _, _, block = await client.until_frame(raw.HEADERS, 1)
    assert len(block) < 2500
    assert int(raw.decode_block(block)[b"grpc-status"])
    client.close()
