"""Timeouts and metadata in their header form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv.rpc.framing import decode_timeout, encode_metadata, encode_timeout, user_metadata


@given(st.floats(min_value=0, max_value=3e8))
def test_timeout_round_trip_never_shortens_and_hardly_lengthens(timeout_s: float) -> None:
    value = encode_timeout(timeout_s)
    assert len(value) <= 9
    decoded = decode_timeout(value)
    assert decoded >= timeout_s * (1 - 1e-12)
    # Eight digits leave a hundred-thousandth at most, until only hours are left.
    assert decoded <= timeout_s * (1 + 1e-5) + 1e-9 or (value.endswith(b"H") and decoded - timeout_s < 3600)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(b"1H", 3600), (b"2M", 120), (b"3S", 3), (b"4m", 0.004), (b"5u", 5e-6), (b"6n", 6e-9), (b"00000001S", 1)],
)
def test_every_unit(value: bytes, seconds: float) -> None:
    assert decode_timeout(value) == pytest.approx(seconds)


@pytest.mark.parametrize("value", [b"", b"S", b"1", b"1s", b"-1S", b"1.5S", b"123456789S", b" 1S", b"1 S", b"\xb2S"])
def test_malformed_timeouts(value: bytes) -> None:
    with pytest.raises(ValueError, match="not a timeout"):
        decode_timeout(value)


def test_huge_timeout_is_capped_not_wrong() -> None:
    assert decode_timeout(encode_timeout(1e15)) == 99_999_999 * 3600


LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz_.-"
names = st.text(LETTERS, min_size=1, max_size=10).map("x-{}".format).filter(lambda name: not name.endswith("-bin"))


@given(st.dictionaries(names, st.text(st.characters(min_codepoint=ord(" "), max_codepoint=ord("~")))))
def test_text_metadata_round_trip(metadata: dict[str, str]) -> None:
    assert user_metadata(encode_metadata(metadata.items())) == metadata


@given(st.binary())
def test_binary_metadata_round_trip(value: bytes) -> None:
    fields = encode_metadata([("x-bin", value)])
    assert user_metadata(fields) == {"x-bin": value}
    assert b"=" not in fields[0][1]


@pytest.mark.parametrize("name", ["Upper", "grpc-timeout", ":path", "te", "content-type", "", "sp ace", "nl\n"])
def test_reserved_and_malformed_names(name: str) -> None:
    with pytest.raises(ValueError, match="not a metadata name"):
        encode_metadata([(name, "value")])


def test_value_that_would_split_the_header() -> None:
    with pytest.raises(ValueError, match="not printable ASCII"):
        encode_metadata([("x", "a\r\nb: c")])


def test_value_that_is_not_utf8_stays_bytes_for_the_handler_to_refuse() -> None:
    assert user_metadata(((b"client-api-version", b"\xff"),)) == {"client-api-version": b"\xff"}


def test_protocol_fields_are_hidden() -> None:
    headers = ((b":path", b"/x"), (b"te", b"trailers"), (b"grpc-timeout", b"1S"), (b"hasleader", b"true"))
    assert user_metadata(headers) == {"hasleader": "true"}
