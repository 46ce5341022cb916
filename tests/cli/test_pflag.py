"""The flag grammar of etcdctl."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv.cli.pflag import BOOL, DURATION, INT, LIST, Flag, FlagError, HelpRequested, parse

FLAGS = [
    Flag("write-out", default="simple", short="w"),
    Flag("hex", BOOL),
    Flag("interactive", BOOL, short="i"),
    Flag("rev", INT),
    Flag("timeout", DURATION, 5.0),
    Flag("endpoints", LIST, ("127.0.0.1:2379",)),
]


def test_defaults():
    parsed = parse(FLAGS, [])
    assert parsed.values == {
        "write-out": "simple",
        "hex": False,
        "interactive": False,
        "rev": 0,
        "timeout": 5.0,
        "endpoints": ("127.0.0.1:2379",),
    }
    assert (parsed.changed, parsed.arguments) == (set(), [])


@pytest.mark.parametrize(
    "words", [["-w", "json"], ["-wjson"], ["-w=json"], ["--write-out", "json"], ["--write-out=json"], ["-iw", "json"]]
)
def test_ways_to_give_a_value(words):
    parsed = parse(FLAGS, words)
    assert parsed.values["write-out"] == "json"
    assert "write-out" in parsed.changed


def test_flags_may_stand_anywhere_until_two_dashes():
    parsed = parse(FLAGS, ["a", "--rev", "3", "b", "-", "--", "--hex", "-w"])
    assert parsed.arguments == ["a", "b", "-", "--hex", "-w"]
    assert (parsed.values["rev"], parsed.values["hex"]) == (3, False)


def test_a_boolean_takes_no_next_word():
    parsed = parse(FLAGS, ["--hex", "false", "-i", "x"])
    assert (parsed.values["hex"], parsed.arguments) == (True, ["false", "x"])
    assert parse(FLAGS, ["--hex=false"]).values["hex"] is False


def test_lists_replace_the_default_and_add_up():
    assert parse(FLAGS, ["--endpoints=a,b", "--endpoints", "c"]).values["endpoints"] == ("a", "b", "c")
    assert parse(FLAGS, ['--endpoints="a,b",c']).values["endpoints"] == ("a,b", "c")
    assert parse(FLAGS, ["--endpoints="]).values["endpoints"] == ()


def test_the_last_of_several_counts():
    assert parse(FLAGS, ["--rev=1", "--rev=2"]).values["rev"] == 2


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--nothing"], "unknown flag: --nothing"),
        (["--writ=json"], "unknown flag: --writ"),
        (["-x"], "unknown shorthand flag: 'x' in -x"),
        (["-ix"], "unknown shorthand flag: 'x' in -x"),
        (["-xi"], "unknown shorthand flag: 'x' in -xi"),
        (["--rev"], "flag needs an argument: --rev"),
        (["-w"], "flag needs an argument: 'w' in -w"),
        (["--=x"], "bad flag syntax: --=x"),
        (["---rev"], "bad flag syntax: ---rev"),
        (["--rev=x"], 'invalid argument "x" for "--rev" flag: strconv.ParseInt: parsing "x": invalid syntax'),
        (["--hex=2"], 'invalid argument "2" for "--hex" flag: strconv.ParseBool: parsing "2": invalid syntax'),
        (["--timeout=1"], 'invalid argument "1" for "--timeout" flag: time: missing unit in duration "1"'),
        (["-i=x"], 'invalid argument "x" for "-i, --interactive" flag: strconv.ParseBool: parsing "x": invalid syntax'),
    ],
)
def test_complaints(words, text):
    with pytest.raises(FlagError) as raised:
        parse(FLAGS, words)
    assert str(raised.value) == text


@pytest.mark.parametrize("words", [["--help"], ["a", "-h"], ["-ih"]])
def test_help(words):
    with pytest.raises(HelpRequested):
        parse(FLAGS, words)


def test_help_that_is_not_wanted():
    parsed = parse(FLAGS, ["--help=false", "a", "-h=0"])
    assert (parsed.arguments, parsed.changed) == (["a"], set())
    with pytest.raises(FlagError, match=r'^invalid argument "x" for "-h, --help" flag: '):
        parse(FLAGS, ["--help=x"])


ARGUMENTS = st.lists(st.text(max_size=8).filter(lambda word: not word.startswith("-")), max_size=5)


@given(ARGUMENTS, st.integers(-(2**63), 2**63 - 1), st.integers(0, 5))
def test_a_flag_reads_the_same_wherever_it_stands(arguments, revision, place):
    words = list(arguments)
    words.insert(min(place, len(words)), f"--rev={revision}")
    parsed = parse(FLAGS, words)
    assert (parsed.values["rev"], parsed.arguments) == (revision, arguments)
