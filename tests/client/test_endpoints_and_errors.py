"""Endpoints as people write them; statuses as errors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv import errors
from raftkv.client.errors import UnknownStatus, from_status
from raftkv.client.rpc.endpoints import Endpoint, parse_endpoint, parse_endpoints
from raftkv.client.scope import prefix_end
from raftkv.errors import ConfigError
from raftkv.rpc.shares import refusal


@pytest.mark.parametrize(
    ("text", "target", "secure"),
    [
        ("127.0.0.1:2379", "127.0.0.1:2379", None),
        ("localhost", "localhost:2379", None),
        ("http://localhost", "localhost:2379", False),
        ("http://h:1", "h:1", False),
        ("https://h:1/", "h:1", True),
        ("[::1]:5", "[::1]:5", None),
        (" h:1 ", "h:1", None),
        ("unix://a:1", "unix:a:1", None),
        ("unixs:///run/a.sock", "unix:/run/a.sock", True),
    ],
)
def test_endpoints(text, target, secure):
    endpoint = parse_endpoint(text)
    assert (endpoint.target, endpoint.secure) == (target, secure)


@pytest.mark.parametrize("text", ["", "ftp://h:1", "h:port", "h:99999", "http://", ":2379", "unix://", "unix://a\0b"])
def test_endpoints_that_are_none(text):
    with pytest.raises(ConfigError):
        parse_endpoint(text)


def test_lists_of_endpoints():
    assert parse_endpoints("a:1, b:2,a:1,") == [Endpoint("a:1", "a", 1, None), Endpoint(" b:2", "b", 2, None)]
    with pytest.raises(ConfigError, match=r"^at least one endpoint must be given$"):
        parse_endpoints([])


def test_every_text_of_the_table_finds_its_class():
    def leaves(kind):
        for child in kind.__subclasses__():
            yield child
            yield from leaves(child)

    table = [
        kind for kind in leaves(errors.StatusError) if vars(kind).get("text") and kind.__module__ == "raftkv.errors"
    ]
    assert len(table) > 30
    for kind in table:
        found = from_status(kind.code, kind.text)
        # One is not in the table of etcd's clients, which print the frame of what they do not know.
        frame = "rpc error: code = Unknown desc = " if kind is errors.NoPasswordUserError else ""
        assert (type(found), found.code, str(found)) == (kind, kind.code, frame + kind.text)


def test_refusal_of_a_share_is_typed_and_keeps_its_text():
    text = refusal(b"alice", "64 passwords that may wait at one member")
    found = from_status(errors.RESOURCE_EXHAUSTED, text)
    assert (type(found), found.code, str(found)) == (errors.ShareError, errors.RESOURCE_EXHAUSTED, text)


def test_statuses_outside_the_table():
    error = from_status(errors.UNKNOWN, "auth: something", definite=True)
    assert isinstance(error, UnknownStatus)
    assert (str(error), error.desc) == ("rpc error: code = Unknown desc = auth: something", "auth: something")
    assert (error.code, error.definite) == (errors.UNKNOWN, True)
    assert str(from_status(99, "x")) == "rpc error: code = Code(99) desc = x"
    assert str(from_status(errors.FAILED_PRECONDITION, "etcdserver: user name not found")) == (
        "etcdserver: user name not found"
    )


@given(st.binary(max_size=6), st.binary(max_size=4), st.binary(max_size=6))
def test_a_prefix_interval_holds_exactly_the_keys_with_the_prefix(prefix, suffix, other):
    end = prefix_end(prefix)

    def inside(key):
        return key >= prefix and (end == b"\0" or key < end)

    assert inside(prefix + suffix)
    assert inside(other) == (other.startswith(prefix) or (end == b"\0" and other >= prefix))
