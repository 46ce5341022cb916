"""Go's text forms: what is read back is what was printed, and the examples of Go's own documentation hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv.cli import pflag


@pytest.mark.parametrize(
    ("text", "nanoseconds"),
    [
        ("0", 0),
        ("5s", 5_000_000_000),
        ("-5s", -5_000_000_000),
        ("+5s", 5_000_000_000),
        ("100ms", 100_000_000),
        ("1h15m30.918273645s", 4_530_918_273_645),
        (".5s", 500_000_000),
        ("1.s", 1_000_000_000),
        ("10us", 10_000),
        ("10µs", 10_000),
        ("2h", 7_200_000_000_000),
        ("9223372036854775807ns", 2**63 - 1),
    ],
)
def test_durations(text, nanoseconds):
    assert pflag.parse_duration_ns(text) == nanoseconds


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", 'time: invalid duration ""'),
        ("3", 'time: missing unit in duration "3"'),
        ("-", 'time: invalid duration "-"'),
        ("s", 'time: invalid duration "s"'),
        (".s", 'time: invalid duration ".s"'),
        ("1x", 'time: unknown unit "x" in duration "1x"'),
        ("1d", 'time: unknown unit "d" in duration "1d"'),
        ("1s2", 'time: missing unit in duration "1s2"'),
        ("9223372036854775808ns", 'time: invalid duration "9223372036854775808ns"'),
    ],
)
def test_durations_that_are_none(text, error):
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the text is compared
        pflag.parse_duration_ns(text)
    assert str(raised.value) == error


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (0, "0s"),
        (1, "1ns"),
        (1_100, "1.1µs"),
        (2_200_000, "2.2ms"),
        (3_300_000_000, "3.3s"),
        (245_000_000_000, "4m5s"),
        (245_001_000_000, "4m5.001s"),
        (18_367_001_000_000, "5h6m7.001s"),
        (3_600_000_000_000, "1h0m0s"),
        (-1_500_000_000, "-1.5s"),
    ],
)
def test_printed_durations(nanoseconds, text):
    assert pflag.format_duration(nanoseconds) == text


@given(st.integers(-(2**62), 2**62))
def test_durations_survive_printing(nanoseconds):
    assert pflag.parse_duration_ns(pflag.format_duration(nanoseconds)) == nanoseconds


@given(st.binary(max_size=60))
def test_bytes_survive_quoting(data):
    assert pflag.unquote(pflag.quote(data)) == data


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"plain", '"plain"'),
        (b'a"b\\c', '"a\\"b\\\\c"'),
        (b"\x00\x07\x08\t\n\v\f\r\x7f", '"\\x00\\a\\b\\t\\n\\v\\f\\r\\x7f"'),
        ("é€😀".encode(), '"é€😀"'),
        (b"\xff\xc3", '"\\xff\\xc3"'),
        ("\u200b\u2028".encode(), '"\\u200b\\u2028"'),
        ("\U000e0001".encode(), '"\\U000e0001"'),
    ],
)
def test_quoting(data, text):
    assert pflag.quote(data) == text


@pytest.mark.parametrize("literal", ['"', '"a', "a", '"\\q"', '"\\x1"', '"\\ud800"', '"\\400"', '"a\nb"', "`a`b`", ""])
def test_literals_that_are_none(literal):
    with pytest.raises(ValueError, match=r"^invalid syntax$"):
        pflag.unquote(literal)


def test_raw_literals_have_no_escapes():
    assert pflag.unquote('`a\\n"b`') == b'a\\n"b'


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10", 10),
        ("-10", -10),
        ("+1", 1),
        ("0x1f", 31),
        ("0b11", 3),
        ("0o17", 15),
        ("017", 15),
        ("1_000", 1000),
        ("0", 0),
    ],
)
def test_integers(text, value):
    assert pflag.parse_int(text) == value


@pytest.mark.parametrize("text", ["", "-", "abc", "1.5", "0x", "1__0", "_1", "1_", " 1", "0b12", "08", "١"])
def test_integers_that_are_none(text):
    with pytest.raises(ValueError, match="invalid syntax"):
        pflag.parse_int(text)


def test_integers_have_bounds():
    assert pflag.parse_int(str(2**63 - 1)) == 2**63 - 1
    assert pflag.parse_int(str(2**64 - 1), signed=False) == 2**64 - 1
    for text, signed in ((str(2**63), True), (str(2**64), False)):
        with pytest.raises(ValueError, match="value out of range"):
            pflag.parse_int(text, signed=signed)
    with pytest.raises(ValueError, match=r"strconv\.ParseUint: parsing \"-1\": invalid syntax"):
        pflag.parse_int("-1", signed=False)


@given(st.integers(-(2**63), 2**63 - 1))
def test_hexadecimal_integers_survive(value):
    assert pflag.parse_int(f"{value:x}", base=16) == value


def test_booleans():
    assert all(map(pflag.parse_bool, ("1", "t", "T", "true", "TRUE", "True")))
    assert not any(map(pflag.parse_bool, ("0", "f", "F", "false", "FALSE", "False")))
    with pytest.raises(ValueError, match=r'strconv\.ParseBool: parsing "yes": invalid syntax'):
        pflag.parse_bool("yes")
