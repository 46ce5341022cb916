"""Messages in a byte stream: any cutting of the bytes gives the same messages."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv.rpc.framing import PREFIX_BYTES, MessageAssembler, frame, prefix_of
from raftkv.rpc.status import Code, RpcError
from tests.fuzz.memory import measured

messages = st.lists(st.binary(max_size=40), max_size=8)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


@given(messages, st.lists(st.integers(0, 1000), max_size=30))
def test_any_cutting_gives_the_same_messages(sent: list[bytes], places: list[int]) -> None:
    assembler = MessageAssembler(1000)
    got = [message for piece in cut(b"".join(map(frame, sent)), places) for message in assembler.feed(piece)]
    assert got == sent
    assert assembler.held_bytes == 0


@given(st.binary(min_size=1, max_size=50), st.integers(1, 54))
def test_held_bytes_are_those_of_the_unfinished_message(message: bytes, size: int) -> None:
    assembler = MessageAssembler(1000)
    framed = frame(message)
    piece = framed[: min(size, len(framed) - 1)]
    assert assembler.feed(frame(b"whole") + piece) == [b"whole"]
    assert assembler.held_bytes == len(piece)


def test_prefix_and_message_are_the_frame() -> None:
    assert prefix_of(b"hello") + b"hello" == frame(b"hello") == b"\0\0\0\0\5hello"


@pytest.mark.parametrize("size", [5, 6])
def test_length_is_refused_before_the_message_is_kept(size: int) -> None:
    """The prefix alone is enough: N is what it announces, although hardly a byte has come."""
    assembler = MessageAssembler(2_097_152)
    with pytest.raises(RpcError) as caught:
        assembler.feed((b"\0" + (2_097_153).to_bytes(4, "big") + b"x")[:size])
    assert caught.value.code is Code.RESOURCE_EXHAUSTED
    assert caught.value.text == "grpc: received message larger than max (2097153 vs. 2097152)"


def test_largest_allowed_message_passes() -> None:
    assert MessageAssembler(10).feed(frame(b"0123456789")) == [b"0123456789"]


@pytest.mark.parametrize(
    ("flag", "encoding", "on_server", "code", "text"),
    [
        (1, None, True, Code.INTERNAL, "grpc: compressed flag set with identity or empty encoding"),
        (1, b"identity", True, Code.INTERNAL, "grpc: compressed flag set with identity or empty encoding"),
        (1, b"gzip", True, Code.UNIMPLEMENTED, 'grpc: Decompressor is not installed for grpc-encoding "gzip"'),
        (1, b"gzip", False, Code.INTERNAL, 'grpc: Decompressor is not installed for grpc-encoding "gzip"'),
        (2, None, True, Code.INTERNAL, "grpc: received unexpected payload format 2"),
    ],
)
def test_flags_that_are_not_offered(flag: int, encoding: bytes, on_server: bool, code: Code, text: str) -> None:
    assembler = MessageAssembler(10, encoding, on_server)
    with pytest.raises(RpcError) as caught:
        assembler.feed(bytes((flag,)) + b"\0\0\0\1x")
    assert (caught.value.code, caught.value.text) == (code, text)


@pytest.mark.long
@pytest.mark.parametrize("piece_bytes", [1, 10, 200, 1000])
def test_an_unfinished_message_takes_the_memory_of_its_bytes(piece_bytes: int) -> None:
    """As an object each, a megabyte in pieces of ten bytes would be five."""
    size = 50_000
    message = bytes(range(250)) * (size // 250)

    def unfinished() -> MessageAssembler:
        assembler = MessageAssembler(size)
        assert assembler.feed(b"\0" + size.to_bytes(4, "big")) == []
        for start in range(0, size - piece_bytes, piece_bytes):
            # A copy, as the engine gives it: pieces of one byte are shared by Python itself.
            assert assembler.feed(bytes(bytearray(message[start : start + piece_bytes]))) == []
        return assembler

    assert measured(unfinished).kept_bytes < 1.25 * size
    assembler = unfinished()
    assert assembler.held_bytes == PREFIX_BYTES + size - piece_bytes
    assert assembler.crumbled is (piece_bytes < 128)
    assert assembler.feed(message[-piece_bytes:]) == [message]
    assert not assembler.crumbled
