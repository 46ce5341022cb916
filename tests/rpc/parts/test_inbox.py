"""The receiving half of a stream: what is unread keeps the window closed, and nothing else does."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv.rpc.framing import MessageAssembler, frame
from raftkv.rpc.inbox import Inbox
from raftkv.rpc.status import RpcError
from tests.rpc.loop import until


def make(returned: list[int]) -> Inbox:
    return Inbox(MessageAssembler(1000), returned.append)


@given(st.lists(st.binary(max_size=30), max_size=6), st.integers(1, 17), st.integers(0, 6))
def test_window_is_returned_for_all_but_the_unread(sent: list[bytes], piece: int, reads: int) -> None:
    async def run() -> None:
        returned: list[int] = []
        inbox = make(returned)
        data = b"".join(map(frame, sent))
        for start in range(0, len(data), piece):
            inbox.feed(data[start : start + piece])
            received = min(start + piece, len(data))
            # What is kept beyond the window that is closed for it is at most one message.
            kept = inbox.unread + inbox.assembler.held_bytes
            assert kept <= received - sum(returned) + max(len(frame(message)) for message in sent)
            assert inbox.unread or sum(returned) == received
        for message in sent[:reads]:
            assert await inbox.get() == message
        unread = sum(len(frame(message)) for message in sent[reads:])
        assert inbox.unread == unread
        assert sum(returned) >= len(data) - unread
        inbox.discard()
        assert sum(returned) == len(data)

    asyncio.run(run())


async def test_reader_waits_and_is_woken_by_message_end_and_error() -> None:
    inbox = make([])
    reader = asyncio.ensure_future(inbox.get())
    await until(lambda: inbox._waiter is not None)
    inbox.feed(frame(b"late"))
    assert await reader == b"late"
    inbox.end()
    assert await inbox.get() is None
    inbox.fail(RpcError(1))
    with pytest.raises(RpcError):
        await inbox.get()


async def test_large_messages_in_small_pieces_do_not_pile_up_behind_an_open_window() -> None:
    """With ten messages unread, at most the first may have been let in for free."""
    returned: list[int] = []
    inbox = make(returned)
    for byte in b"".join(map(frame, [bytes(100)] * 10)):
        inbox.feed(bytes((byte,)))
    assert sum(returned) <= 105
    for _ in range(10):
        await inbox.get()
    assert sum(returned) == 1050


async def test_messages_before_the_error_are_still_read() -> None:
    inbox = make([])
    inbox.feed(frame(b"one"))
    inbox.fail(RpcError(14, "gone"))
    assert await inbox.get() == b"one"
    with pytest.raises(RpcError, match="gone"):
        await inbox.get()


async def test_two_readers_are_a_bug_and_said_to_be() -> None:
    inbox = make([])
    first = asyncio.ensure_future(inbox.get())
    await until(lambda: inbox._waiter is not None)
    with pytest.raises(RuntimeError, match="two tasks"):
        await inbox.get()
    inbox.end()
    assert await first is None
