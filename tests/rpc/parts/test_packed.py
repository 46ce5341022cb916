"""Compressed messages: any cutting and any steps give what was packed, and no step is much work."""

from __future__ import annotations

import gzip
import zlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv.rpc.framing import PREFIX, PREFIX_BYTES, ROOM_BYTES, PackedAssembler, Unpacking, frame
from raftkv.rpc.status import Code, RpcError
from tests.fuzz.memory import measured
from tests.rpc.parts.test_framing import cut

LIMIT_BYTES = 2 * 1024 * 1024
messages = st.lists(st.tuples(st.booleans(), st.binary(max_size=2000)), max_size=8)


def packed(message: bytes) -> bytes:
    data = gzip.compress(message, mtime=0)
    return PREFIX.pack(1, len(data)) + data


def feed(assembler: PackedAssembler, data: bytes) -> list[bytes]:
    """Feed a payload, and go on until it is done."""
    got = assembler.feed(data)
    while assembler.is_busy:
        got += assembler.feed(b"")
    return got


def tables(size_bytes: int) -> bytes:
    """A member of blocks that hold nothing but their tables: what takes longest to unpack."""
    # Code lengths: 138 and 118 zeros, then one bit each for the end of a block, a length and a distance.
    bits = "1" + f"{127:07b}"[::-1] + "1" + f"{107:07b}"[::-1] + "000"
    lengths = "".join(f"{int(one in (2, 17)):03b}"[::-1] for one in range(18))
    block = "0" + "01" + f"{1:05b}"[::-1] + "00000" + f"{14:04b}"[::-1] + lengths + bits + "0"
    eight = int((block * 8)[::-1], 2).to_bytes(len(block), "little")
    head = b"\x1f\x8b\x08" + bytes(7)
    body = eight * (size_bytes // len(eight)) + b"\x01\0\0\xff\xff"
    return head + body + bytes(8)


@given(messages, st.lists(st.integers(0, 20_000), max_size=30))
def test_any_cutting_gives_the_same_messages(sent: list[tuple[bool, bytes]], places: list[int]) -> None:
    assembler = PackedAssembler(2000)
    octets = b"".join(packed(message) if is_packed else frame(message) for is_packed, message in sent)
    got = [message for piece in cut(octets, places) for message in feed(assembler, piece)]
    assert got == [message for _, message in sent]
    assert assembler.held_bytes == 0


@pytest.mark.parametrize("level", [0, 1, 9])
def test_the_largest_message_passes_and_one_octet_more_does_not(level: int) -> None:
    data = gzip.compress(bytes(range(256)) * 4, compresslevel=level)
    for limit, is_whole in ((1024, True), (1023, False)):
        assembler = PackedAssembler(limit)
        octets = PREFIX.pack(1, len(data)) + data
        if is_whole and len(data) <= limit:
            assert feed(assembler, octets) == [bytes(range(256)) * 4]
        else:
            with pytest.raises(RpcError, match="larger than max"):
                feed(assembler, octets)


def test_a_bomb_is_unpacked_a_piece_at_a_time_and_counted() -> None:
    assembler = PackedAssembler(LIMIT_BYTES)
    message = bytes(LIMIT_BYTES)
    got = assembler.feed(packed(message) * 2)
    sizes = [assembler.held_bytes]
    while assembler.is_busy:
        got += assembler.feed(b"")
        sizes.append(assembler.held_bytes)
    assert got == [message, message]
    steps = len(sizes) // 2
    assert steps >= LIMIT_BYTES // ROOM_BYTES
    rises = [after - before for before, after in pairwise(sizes)]
    assert max(rises) <= ROOM_BYTES
    assert max(sizes) > LIMIT_BYTES - 2 * ROOM_BYTES
    assert sizes[-1] == 0


@pytest.mark.long
def test_one_that_lies_about_its_size_is_given_up_at_the_limit() -> None:
    bomb = gzip.compress(bytes(100 * LIMIT_BYTES))
    assembler = PackedAssembler(LIMIT_BYTES)

    def unpack() -> PackedAssembler:
        with pytest.raises(RpcError) as caught:
            feed(assembler, PREFIX.pack(1, len(bomb)) + bomb[:-4] + b"\1\0\0\0")
        assert caught.value.code is Code.RESOURCE_EXHAUSTED
        return assembler

    assert measured(unpack).peak_bytes < 4 * LIMIT_BYTES


def test_unpacking_to_nothing_is_many_small_steps() -> None:
    size = 64 * 1024
    data = tables(size)
    assert zlib.decompress(data[10:-8], -15) == b""
    unpacking, steps = Unpacking(data, LIMIT_BYTES), 1
    while unpacking.step() is None:
        steps += 1
    assert steps >= size // (8 * 1024)
    members = gzip.compress(b"") * 100
    unpacking, steps = Unpacking(members, LIMIT_BYTES), 1
    while unpacking.step() is None:
        steps += 1
    assert steps >= 100


def test_dropped_message_is_forgotten() -> None:
    assembler = PackedAssembler(LIMIT_BYTES)
    assembler.feed(packed(bytes(LIMIT_BYTES)) * 3 + bytes(PREFIX_BYTES - 1))
    assert assembler.is_busy
    assembler.drop()
    assert not assembler.is_busy
    assert assembler.held_bytes == assembler.pieces == 0


def test_damaged_data_is_said_without_where() -> None:
    data = gzip.compress(b"", mtime=0)[:10] + b"\xff" * 16
    with pytest.raises(RpcError) as caught:
        feed(PackedAssembler(2**32), PREFIX.pack(1, len(data)) + data)
    expected = "grpc: failed to decompress the received message flate: corrupt input"
    assert (caught.value.code, caught.value.text) == (Code.INTERNAL, expected)
