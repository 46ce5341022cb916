"""RFC 7541: integers, strings, Huffman code, tables, limits; its examples, and hyper's ``hpack`` as the other end."""

from __future__ import annotations

from random import Random

import hpack
import pytest
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH

from raftkv.rpc.http2 import ConnectionFailedError, Headers
from raftkv.rpc.http2 import hpack as our_hpack
from raftkv.rpc.http2.hpack import STATIC, Decoder, DynamicTable, Encoder, number

ENCODER = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH)
LIST_BYTES = 1 << 16


def _decoder() -> Decoder:
    return Decoder(LIST_BYTES, 1000)


def _refused(block: bytes, decoder: Decoder | None = None) -> str:
    with pytest.raises(ConnectionFailedError) as caught:
        (decoder or _decoder()).decode(block)
    return caught.value.code.name


def test_static_table() -> None:
    """Appendix A."""
    assert len(STATIC) == 61
    for index, field in enumerate(STATIC, start=1):
        assert _decoder().decode(bytes((0x80 | index,)))[0] == (field,)
    assert STATIC[0] == (b":authority", b"")
    assert STATIC[15] == (b"accept-encoding", b"gzip, deflate")
    assert STATIC[60] == (b"www-authenticate", b"")


@pytest.mark.parametrize(
    ("value", "mask", "octets"), [(10, 0x1F, "0a"), (1337, 0x1F, "1f9a0a"), (42, 0xFF, "2a"), (31, 0x1F, "1f00")]
)
def test_integers(value: int, mask: int, octets: str) -> None:
    """Appendix C.1, and a number that just fills its prefix."""
    assert number(value, mask, 0) == bytes.fromhex(octets)


REFUSED = [
    # Section, block. All are COMPRESSION_ERROR.
    ("2.3.3: entry 0", "80"),
    ("2.3.3: an entry behind the table", "be"),
    ("2.3.3: so of a name", "7f0001 61"),
    ("2.3.3: far behind", "ffffffff0f"),
    ("5.1: a number that ends too early", "ff"),
    ("5.1: so in its middle", "ff80"),
    ("5.1: a number that never ends", "ff" + "80" * 6 + "00"),
    ("5.1: a number above 2^32", "ffffffffff7f"),
    ("5.1: so of a length", "00 01 78 7fffffffffff7f"),
    ("5.2: a name that ends too early", "00 02 78"),
    ("5.2: a value that ends too early", "00 01 78 02 79"),
    ("5.2: no value", "00 01 78"),
    ("5.2: no name", "00"),
    ("5.2: no value of an indexed name", "44"),
    ("5.2: the end of the string in a string", "00 01 78 84 ffffffff"),
    ("5.2: the end of the string, padded", "00 01 78 84 fffffffc"),
    ("5.2: the end of the string after an octet", "00 01 78 85 1fffffffff"),
    ("5.2: padding of 8 bits", "00 01 78 81 ff"),
    ("5.2: padding of 8 bits after an octet", "00 01 78 82 1fff"),
    ("5.2: padding of zeros", "00 01 78 81 18"),
    ("5.2: padding with a zero", "00 01 78 81 1e"),
    ("4.2: a size after a field", "82 20"),
    ("4.2: so at the end of a block", "82 84 3f01"),
    ("4.2: a size above the limit", "3fe21f"),
    ("4.2: the second size above the limit", "20 3fe21f"),
    ("4.2: a size without an end", "3f"),
]


def test_refused() -> None:
    for rule, block in REFUSED:
        assert _refused(bytes.fromhex(block)) == "COMPRESSION_ERROR", rule


TAKEN: list[tuple[str, str, Headers]] = [
    ("6.3: a size", "20 82", ((b":method", b"GET"),)),
    ("6.3: two sizes", "20 3fe11f 82", ((b":method", b"GET"),)),
    ("6.3: the largest size", "3fe11f 82", ((b":method", b"GET"),)),
    ("6.3: nothing but a size", "20", ()),
    ("5.1: a number with zeros behind it", "00 01 78 7f8080808000" + "79" * 127, ((b"x", b"y" * 127),)),
    ("5.2: an empty string in Huffman code", "00 01 78 80", ((b"x", b""),)),
    ("5.2: padding of 7 bits", "00 01 78 81 1f", ((b"x", b"a"),)),
    ("6.2.1: with indexing", "40 01 78 01 79 be", ((b"x", b"y"), (b"x", b"y"))),
    ("6.2.2: without indexing", "00 01 78 01 79", ((b"x", b"y"),)),
    ("6.2.3: never indexed", "10 01 78 01 79", ((b"x", b"y"),)),
    ("6.2.1: its name out of the dynamic table", "40 01 78 01 79 7e 01 7a", ((b"x", b"y"), (b"x", b"z"))),
    ("4.4: larger than the table", "20 40 01 78 01 79 82", ((b"x", b"y"), (b":method", b"GET"))),
]


def test_taken() -> None:
    for rule, block, fields in TAKEN:
        assert _decoder().decode(bytes.fromhex(block))[0] == fields, rule


@pytest.mark.parametrize("block", ["00 01 78 01 79 be", "10 01 78 01 79 be", "20 40 01 78 01 79 be"])
def test_headers_kept_out_of_the_table(block: str) -> None:
    """Sections 6.2.2, 6.2.3, 4.4."""
    assert _refused(bytes.fromhex(block)) == "COMPRESSION_ERROR"


def test_the_oldest_entries_go() -> None:
    """Section 4.4; the name of a new entry may be that of one which goes for it."""
    decoder = _decoder()
    decoder.decode(bytes.fromhex("3f21"))  # 64 octets: one entry
    assert decoder.decode(b"\x40\x01a\x01b")[0] == ((b"a", b"b"),)
    assert decoder.decode(b"\x7e\x02cd")[0] == ((b"a", b"cd"),)
    assert decoder.decode(b"\xbe")[0] == ((b"a", b"cd"),)
    assert _refused(b"\xbf", decoder) == "COMPRESSION_ERROR"


def test_a_smaller_size_drops_entries_for_good() -> None:
    """Section 4.3."""
    decoder = _decoder()
    decoder.decode(b"\x40\x01a\x01b" + b"\x40\x01c\x01d")
    assert decoder.decode(bytes.fromhex("3f03 3fe11f be"))[0] == ((b"c", b"d"),)  # 34 octets: one entry
    assert _refused(b"\xbf", decoder) == "COMPRESSION_ERROR"


def test_sizes_of_entries() -> None:
    """Section 4.1: name, value and 32."""
    table = DynamicTable()
    table.resize(100)
    assert table.insert((b"a" * 34, b"b" * 34)) == 0
    assert table.size_bytes == 100
    assert table.insert((b"a", b"b" * 68)) == 1
    assert table.size_bytes == 0
    assert not table.entries


# Appendix C.2 to C.6, as (what the table may hold, Huffman code, blocks with their fields and the table's size after).
_C2 = [
    ("400a637573746f6d2d6b65790d637573746f6d2d686561646572", ((b"custom-key", b"custom-header"),), 55),
    ("040c2f73616d706c652f70617468", ((b":path", b"/sample/path"),), 0),
    ("100870617373776f726406736563726574", ((b"password", b"secret"),), 0),
    ("82", ((b":method", b"GET"),), 0),
]
_GET = ((b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"www.example.com"))
_THIRD = (
    (b":method", b"GET"),
    (b":scheme", b"https"),
    (b":path", b"/index.html"),
    (b":authority", b"www.example.com"),
    (b"custom-key", b"custom-value"),
)
_REQUESTS = (_GET, (*_GET, (b"cache-control", b"no-cache")), _THIRD)
_DATES = (b"Mon, 21 Oct 2013 20:13:21 GMT", b"Mon, 21 Oct 2013 20:13:22 GMT")
_COOKIE = b"foo=ASDJKHQKBZXOQWEOPIUAXQWEOIU; max-age=3600; version=1"
_FOUND = (
    (b":status", b"302"),
    (b"cache-control", b"private"),
    (b"date", _DATES[0]),
    (b"location", b"https://www.example.com"),
)
_RESPONSES = (
    _FOUND,
    ((b":status", b"307"), *_FOUND[1:]),
    (
        (b":status", b"200"),
        (b"cache-control", b"private"),
        (b"date", _DATES[1]),
        (b"location", b"https://www.example.com"),
        (b"content-encoding", b"gzip"),
        (b"set-cookie", _COOKIE),
    ),
)
_C3 = (
    "828684410f7777772e6578616d706c652e636f6d",
    "828684be58086e6f2d6361636865",
    "828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565",
)
_C4 = (
    "828684418cf1e3c2e5f23a6ba0ab90f4ff",
    "828684be5886a8eb10649cbf",
    "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf",
)
_C5 = (
    "4803333032580770726976617465611d4d6f6e2c203231204f637420323031332032303a31333a323120474d546e1768747470733a2f2f7777"
    "772e6578616d706c652e636f6d",
    "4803333037c1c0bf",
    "88c1611d4d6f6e2c203231204f637420323031332032303a31333a323220474d54c05a04677a69707738666f6f3d4153444a4b48514b425a58"
    "4f5157454f50495541585157454f49553b206d61782d6167653d333630303b2076657273696f6e3d31",
)
_C6 = (
    "488264025885aec3771a4b6196d07abe941054d444a8200595040b8166e082a62d1bff6e919d29ad171863c78f0b97c8e9ae82ae43d3",
    "4883640effc1c0bf",
    "88c16196d07abe941054d444a8200595040b8166e084a62d1bffc05a839bd9ab77ad94e7821dd7f2e6c7b335dfdfcd5b3960d5af27087f3672"
    "c1ab270fb5291f9587316065c003ed4ee5b1063d5007",
)


@pytest.mark.parametrize(
    ("blocks", "messages", "sizes", "capacity_bytes"),
    [
        (_C3, _REQUESTS, (57, 110, 164), 4096),
        (_C4, _REQUESTS, (57, 110, 164), 4096),
        (_C5, _RESPONSES, (222, 222, 215), 256),
        (_C6, _RESPONSES, (222, 222, 215), 256),
    ],
)
def test_examples_of_the_standard(blocks, messages, sizes, capacity_bytes):
    """Appendix C.3 to C.6: messages of one connection, without and with Huffman code."""
    decoder = _decoder()
    decoder.decode(number(capacity_bytes, 0x1F, 0x20))
    for block, fields, size_bytes in zip(blocks, messages, sizes, strict=True):
        assert decoder.decode(bytes.fromhex(block))[0] == fields
        assert decoder._table.size_bytes == size_bytes


@pytest.mark.parametrize(("block", "fields", "size_bytes"), _C2)
def test_single_examples_of_the_standard(block: str, fields: Headers, size_bytes: int) -> None:
    decoder = _decoder()
    assert decoder.decode(bytes.fromhex(block))[0] == fields
    assert decoder._table.size_bytes == size_bytes


def test_huffman_code_is_that_of_the_standard() -> None:
    """Appendix B, by hyper's table."""
    assert [code for code, _ in our_hpack.codes()] == list(REQUEST_CODES)
    assert list(our_hpack.LENGTHS) == list(REQUEST_CODES_LENGTH)
    for octet in range(256):
        for text in (bytes((octet,)), bytes((octet,)) * 9, b"a" + bytes((octet,))):
            assert our_hpack.decode(ENCODER.encode(text)) == text


@pytest.mark.parametrize("bits", range(1, 8))
def test_every_length_of_padding(bits: int) -> None:
    """Section 5.2: at most 7 ones; a zero at their end is an error, and so is an octet more."""
    text = next(text for text in (b"0" * n for n in range(1, 9)) if -5 * len(text) % 8 == bits)
    octets = ENCODER.encode(text)
    assert our_hpack.decode(octets) == text
    for bad in [octets[:-1] + bytes((octets[-1] ^ 1 << bit,)) for bit in range(min(bits, 2))]:
        with pytest.raises(our_hpack.HuffmanError):
            our_hpack.decode(bad)
    with pytest.raises(our_hpack.HuffmanError):
        our_hpack.decode(octets + b"\xff")


def _limited(block: bytes, list_bytes: int, count: int) -> bool:
    try:
        Decoder(list_bytes, count).decode(block)
    except ConnectionFailedError as error:
        return error.code.name != "ENHANCE_YOUR_CALM"
    return True


def test_limits_of_a_block() -> None:
    """RFC 9113 sections 6.5.2 and 10.5.1: fields count as name, value and 32, wherever they come from."""
    assert _limited(b"\0\1x\1y" * 3, 34 * 3, 3)
    assert not _limited(b"\0\1x\1y" * 3, 34 * 3 - 1, 3)
    assert not _limited(b"\0\1x\1y" * 3, 34 * 3, 2)
    big = b"\x40\1x\x7f\xa1\x1e" + b"y" * 4000
    assert _limited(big + b"\xbe" * 3, 4 * 4033, 10)
    assert not _limited(big + b"\xbe" * 4, 4 * 4033, 10)


NAMES = (b":path", b"content-type", b"x-a", b"grpc-status", b"te", b"token", b"user-agent", b"authorization")
VALUES = (b"", b"a", b"trailers", b"0", b"application/grpc", b"v" * 200, b"x" * 1500)


def _fields(rng: Random) -> Headers:
    def value() -> bytes:
        return rng.choice(VALUES) if rng.random() < 0.7 else rng.randbytes(3).hex().encode()

    return tuple((rng.choice(NAMES), value()) for _ in range(rng.randrange(9)))


@pytest.mark.parametrize("seed", range(5))
def test_own_encoding_is_decoded_by_others(seed: int) -> None:
    """Any fields, after any changes of the table's size; a block that is remembered stays in step."""
    rng = Random(seed)
    ours, theirs = Encoder(NAMES[:4]), hpack.Decoder()
    known = [_fields(rng) for _ in range(4)]
    for _ in range(100):
        for _ in range(rng.choice((0, 0, 0, 0, 1, 2))):
            ours.limit(rng.choice((0, 40, 100, 200, 1000, 4096, 9999)))
        fields = rng.choice(known) if rng.random() < 0.5 else _fields(rng)
        found = theirs.decode(ours.encode(fields), raw=True)
        assert tuple((bytes(name), bytes(value)) for name, value in found) == fields


@pytest.mark.parametrize("seed", range(5))
def test_encoding_of_others_is_decoded(seed: int) -> None:
    """And said to be stable only if the same octets mean the same once more."""
    rng = Random(seed)
    ours, theirs = _decoder(), hpack.Encoder()
    for _ in range(100):
        fields = _fields(rng)
        if rng.random() < 0.1:
            theirs.header_table_size = rng.choice((0, 100, 1000, 4096))
        block = theirs.encode([hpack.HeaderTuple(*field) for field in fields], huffman=rng.random() < 0.5)
        found, _, is_stable = ours.decode(block)
        assert found == fields
        if is_stable:
            assert ours.decode(block)[0] == fields


def test_secrets_are_never_indexed() -> None:
    """Section 7.1.3: neither here nor by a proxy on the way."""
    for name in (b"authorization", b"cookie", b"token"):
        block = Encoder([]).encode(((name, b"secret"),))
        assert block[0] & 0xF0 == 0x10
        ((found, value),) = hpack.Decoder().decode(block, raw=True)
        assert (found, value) == (name, b"secret")


def test_a_new_size_is_said_first_and_the_smallest_with_it() -> None:
    """Section 4.2: what SETTINGS_HEADER_TABLE_SIZE was in between is sent too: entries have gone for it."""
    ours, theirs = Encoder([b"x"]), hpack.Decoder()
    field = ((b"x", b"y"),)
    for block in (ours.encode(field), ours.encode(field)):
        assert theirs.decode(block, raw=True) == [*field]
    ours.limit(0)
    ours.limit(4096)
    block = ours.encode(field)
    assert block.startswith(b"\x20\x3f\xe1\x1f\x40")
    assert theirs.decode(block, raw=True) == [*field]
