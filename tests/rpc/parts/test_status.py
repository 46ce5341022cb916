"""Statuses in their header form, and the tables that make codes of resets and HTTP statuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv.rpc.http2 import ErrorCode
from raftkv.rpc.status import (
    CODE_OF_RESET,
    Code,
    RpcError,
    decode_binary,
    decode_message,
    encode_binary,
    encode_message,
    status_headers,
    status_of,
)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_message_round_trip(text: str) -> None:
    value = encode_message(text)
    assert decode_message(value) == text
    assert all(0x20 <= byte <= 0x7E for byte in value)


def test_message_form_is_that_of_the_protocol() -> None:
    assert encode_message("100% ä\n~") == b"100%25 %C3%A4%0A~"


@pytest.mark.parametrize(("value", "text"), [(b"%", "%"), (b"%zz", "%zz"), (b"a%2", "a%2"), (b"%FF", "\ufffd")])
def test_broken_escapes_stay_readable(value: bytes, text: str) -> None:
    assert decode_message(value) == text


@given(st.binary())
def test_binary_round_trip_with_and_without_padding(value: bytes) -> None:
    assert decode_binary(encode_binary(value)) == value
    padded = encode_binary(value)
    assert decode_binary(padded + b"=" * (-len(padded) % 4)) == value


@given(st.integers(1, 16), st.text(st.characters(exclude_categories=["Cs"])), st.binary())
def test_status_round_trip(code: int, text: str, details: bytes) -> None:
    fields = status_headers(code, text, details, ((b"x", b"y"),))
    error = status_of(dict(fields), fields)
    assert isinstance(error, RpcError)
    assert (error.code, error.text, error.details, error.trailers) == (code, text, details, ((b"x", b"y"),))


def test_ok_is_no_error() -> None:
    assert status_of({b"grpc-status": b"0"}, ()) is None


@pytest.mark.parametrize("value", [b"", b"x", b"-1", b"1 ", b"9" * 20, None])
def test_invalid_or_missing_status_is_unknown(value: bytes | None) -> None:
    error = status_of({} if value is None else {b"grpc-status": value}, ())
    assert error is not None
    assert error.code is Code.UNKNOWN


def test_code_that_grpc_does_not_have_is_kept() -> None:
    error = status_of({b"grpc-status": b"77"}, ())
    assert error is not None
    assert error.code == 77
    assert str(error) == "77: "


def test_every_reset_code_has_a_grpc_code() -> None:
    assert set(CODE_OF_RESET) == set(ErrorCode)
