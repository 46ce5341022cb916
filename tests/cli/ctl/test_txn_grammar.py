"""The language of ``txn``: what is written is what is read; what etcdctl 3.5 gets wrong is read right."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv.cli.ctl import kv as ctl_txn
from raftkv.cli.pflag import quote
from raftkv.cli.program import INVALID_INPUT, CommandError
from raftkv.pb import rpc_pb2

Compare = rpc_pb2.Compare
TARGETS = {
    "ver": ("version", Compare.VERSION),
    "version": ("version", Compare.VERSION),
    "c": ("create_revision", Compare.CREATE),
    "create": ("create_revision", Compare.CREATE),
    "m": ("mod_revision", Compare.MOD),
    "mod": ("mod_revision", Compare.MOD),
}
OPERATORS = {"=": Compare.EQUAL, "!=": Compare.NOT_EQUAL, ">": Compare.GREATER, "<": Compare.LESS}
BLANKS = st.text(alphabet=" \t", min_size=1, max_size=3)


@given(
    st.sampled_from(sorted(TARGETS)),
    st.binary(max_size=20),
    st.sampled_from(sorted(OPERATORS)),
    st.integers(-(2**63), 2**63 - 1),
    BLANKS,
    BLANKS,
)
def test_numbers(target, key, operator, number, before, after):
    compare = ctl_txn.parse_compare(f'{target}({quote(key)}){before}{operator}{after}"{number}"')
    field, expected = TARGETS[target]
    assert (compare.key, compare.target, compare.result) == (key, expected, OPERATORS[operator])
    assert (compare.WhichOneof("target_union"), getattr(compare, field)) == (field, number)


@given(st.binary(max_size=20), st.binary(max_size=20))
def test_values(key, value):
    compare = ctl_txn.parse_compare(f"value({quote(key)}) = {quote(value)}")
    assert (compare.key, compare.target, compare.value) == (key, Compare.VALUE, value)


def test_leases_are_hexadecimal():
    compare = ctl_txn.parse_compare('lease("k") = "7b"')
    assert (compare.key, compare.target, compare.lease) == (b"k", Compare.LEASE, 0x7B)


@given(st.binary(max_size=20), st.binary(max_size=20))
def test_puts(key, value):
    operation = ctl_txn.parse_operation(f"put -- {quote(key)} {quote(value)}").request_put
    assert (operation.key, operation.value) == (key, value)


def test_words():
    assert ctl_txn.split_words('put "a b" \'c "d" e\' f\tg') == ["put", "a b", 'c "d" e', "f", "g"]
    assert ctl_txn.split_words("put '' x") == ["put", "", "x"]


def test_operations_take_the_flags_of_their_commands():
    operation = ctl_txn.parse_operation("get k --prefix --limit 3 --rev=5")
    assert operation.request_range == rpc_pb2.RangeRequest(key=b"k", range_end=b"l", limit=3, revision=5)
    operation = ctl_txn.parse_operation("del a z --prev-kv")
    assert operation.request_delete_range == rpc_pb2.DeleteRangeRequest(key=b"a", range_end=b"z", prev_kv=True)
    operation = ctl_txn.parse_operation("put k v --lease=7b")
    assert operation.request_put == rpc_pb2.PutRequest(key=b"k", value=b"v", lease=0x7B)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("mod", "malformed comparison: mod"),
        ('size("k") = "1"', 'malformed comparison: size("k") = "1" (unknown target size)'),
        ('mod("k") ~ "1"', 'malformed comparison: mod("k") ~ "1" (unknown operator)'),
        ('mod("k") = "x"', 'invalid txn compare request: mod("k") = "x"'),
        ('mod("k")', 'malformed comparison: mod("k"); got mod("k")  ""'),
        ("mod(k) = 1", 'malformed comparison: mod(k) = 1; got mod("")  ""'),
    ],
)
def test_comparisons_that_are_none(line, text):
    with pytest.raises(CommandError) as raised:
        ctl_txn.parse_compare(line)
    assert (str(raised.value), raised.value.code) == (text, INVALID_INPUT)


def test_the_three_parts():
    prompts: list[str] = []
    source = io.BytesIO(b'mod("a") = "1"\n\n put b 1 \nget c\n \n\n')
    request = ctl_txn.read_txn(source, prompts.append)
    assert [len(request.compare), len(request.success), len(request.failure)] == [1, 2, 0]
    assert [text.split(" ")[0] for text in prompts] == ["compares:", "success", "failure"]


def test_words_that_a_request_would_lose_and_a_cut_transaction_are_refused():
    for line in ('put k a"b c"d', "get a b c", "del a b c", "put k v w --prev-kv"):
        with pytest.raises(CommandError, match=r"^invalid txn") as raised:
            ctl_txn.parse_operation(line)
        assert raised.value.code == INVALID_INPUT
    with pytest.raises(CommandError, match=r"^EOF$") as raised:
        ctl_txn.read_txn(io.BytesIO(b"\nput a b\n"), str)
    assert raised.value.details == (
        "the transaction ends early: it has three parts, and an empty line ends each (raftkvctl txn --help)",
    )
