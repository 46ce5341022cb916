"""Endpoints as people write them; statuses as errors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv import errors
from raftkv.client.errors import UnknownStatus, from_status
from raftkv.client.scope import prefix_end
from raftkv.errors import ConfigError
from raftkv.rpc.shares import refusal
from raftkv.urls import Endpoint, join_address, parse_endpoint, parse_endpoints, split_address

TAKEN = [
    ("127.0.0.1:2379", "127.0.0.1:2379", None),
    ("localhost", "localhost:2379", None),
    ("http://localhost", "localhost:2379", False),
    ("http://h:1", "h:1", False),
    ("HTTP://H:1", "h:1", False),
    ("https://h:1/", "h:1", True),
    ("http://h:1/path?query#fragment", "h:1", False),
    ("http://h:1?x@y", "h:1", False),
    ("h:1/", "h:1", None),
    ("h:", "h:2379", None),
    ("[::1]:5", "[::1]:5", None),
    ("[::1]", "[::1]:2379", None),
    ("[fe80::1%eth0]:1", "[fe80::1%eth0]:1", None),
    ("http://[fe80::1%25eth0]:1", "[fe80::1%eth0]:1", False),
    (" h:1 ", "h:1", None),
    ("unix://a:1", "unix:a:1", None),
    ("unix:///run/a.sock", "unix:/run/a.sock", None),
    ("unix:/run/a.sock", "unix:/run/a.sock", None),
    ("unix:a.sock", "unix:a.sock", None),
    ("unixs:///run/a.sock", "unix:/run/a.sock", True),
]
"""Endpoints as etcd's client takes them, too."""

_NO_PLACE = "has no valid host and port"
_USER = "user name and password are not part of an endpoint"
REFUSED = [
    ("", "has no host"),
    (":2379", "has no host"),
    ("http://", "has no host"),
    ("[]:1", "has no host"),
    ("a b:1", "has no host"),
    ("h\n:1", "has no host"),
    ("ftp://h:1", "is not host:port, http://, https:// or unix://"),
    ("h:port", _NO_PLACE),
    ("h:99999", _NO_PLACE),
    ("h:" + "9" * 5000, _NO_PLACE),
    ("h:\u0663", _NO_PLACE),
    ("::1", _NO_PLACE),
    ("[::1", _NO_PLACE),
    ("http://a b:1", "invalid character"),
    ("http://[fe80::1%eth0]:1", "invalid URL escape"),
    ("unix:", "names no socket file"),
    ("unix://", "names no socket file"),
    ("unix://a\0b", "names no socket file"),
    ("user:secret@h:1", _USER),
    ("http://user:secret@h:1", _USER),
    ("http://user:secret@h:port", _USER),
]


@pytest.mark.parametrize(("text", "target", "secure"), TAKEN)
def test_endpoint_is_read_as_etcds_client_reads_it(text, target, secure):
    endpoint = parse_endpoint(text)
    assert (endpoint.target, endpoint.secure) == (target, secure)


@pytest.mark.parametrize(("text", "words"), REFUSED)
def test_refusal_of_an_endpoint_names_the_cause_and_no_password(text, words):
    with pytest.raises(ConfigError) as raised:
        parse_endpoint(text)
    assert words in str(raised.value)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("text", ["h:1", "[::1]:65535", ":0", "h:00001"])
def test_address_is_split_into_host_and_port(text):
    host, port = split_address(text)
    assert split_address(join_address(host, port)) == (host, port)


@pytest.mark.parametrize("text", ["h", "h:", "h:-1", "h:65536", "h:\u00b2", "h:" + "1" * 5000, "::1:80", "[::1]", ""])
def test_text_without_host_and_port_is_no_address(text):
    with pytest.raises(ValueError, match=r'^not "host:port"$'):
        split_address(text)


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
