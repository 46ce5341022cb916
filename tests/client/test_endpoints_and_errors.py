"""Endpoints as people write them; statuses as errors."""

from __future__ import annotations

import asyncio
import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv import aio, errors
from raftkv.client.errors import (
    ConnectionLost,
    EndpointsFailed,
    MessageTooLarge,
    ReceivedTooLarge,
    UnknownStatus,
    WireStatus,
    WrongPort,
    from_status,
)
from raftkv.client.rpc.retry import is_transient
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
    ("::1", f"{_NO_PLACE}: an IPv6 address stands in brackets"),
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
def test_text_without_host_and_port_is_not_an_address(text):
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


_FRAME = "rpc error: code = {} desc = {}"
_SERVICE = "unknown service etcdserverpb.KV"
STATUSES = [
    (errors.CANCELED, "etcdserver: request canceled", WireStatus),
    (errors.CANCELED, "context canceled", UnknownStatus),
    (errors.UNKNOWN, "auth: something", UnknownStatus),
    (errors.INVALID_ARGUMENT, "raftkv: unknown alarm action 7", errors.InvalidAlarmError),
    (errors.INVALID_ARGUMENT, "raftkv: a password must have at least 8 characters", errors.InvalidPasswordError),
    (errors.INVALID_ARGUMENT, "raftkv: hashedPassword must be a bcrypt hash", errors.InvalidPasswordError),
    (errors.INVALID_ARGUMENT, "invalid grpc-timeout: x", UnknownStatus),
    (errors.DEADLINE_EXCEEDED, "upstream timed out", UnknownStatus),
    (errors.NOT_FOUND, "unknown service", UnknownStatus),
    (errors.ALREADY_EXISTS, "nothing of raftkv or etcd sends it", UnknownStatus),
    (errors.PERMISSION_DENIED, "RBAC: access denied", UnknownStatus),
    (errors.RESOURCE_EXHAUSTED, "trying to send message larger than max (3000015 vs. 2097152)", MessageTooLarge),
    (errors.RESOURCE_EXHAUSTED, "grpc: received message larger than max (11 vs. 10)", ReceivedTooLarge),
    (errors.RESOURCE_EXHAUSTED, refusal(b"alice", "64 passwords that may wait at one member"), errors.ShareError),
    (errors.RESOURCE_EXHAUSTED, f"{errors.NoSpaceError.text} (raftkv: quota of 'a/')", errors.QuotaExceededError),
    (errors.RESOURCE_EXHAUSTED, f"{errors.AuthLimitError.text} (10 users)", errors.AuthLimitError),
    (errors.RESOURCE_EXHAUSTED, "too many calls are waiting for a connection", UnknownStatus),
    (errors.FAILED_PRECONDITION, f"{errors.ConfChangeRefusedError.text}: why", errors.ConfChangeRefusedError),
    (errors.FAILED_PRECONDITION, "another server's words", UnknownStatus),
    (errors.ABORTED, "nothing of raftkv or etcd sends it", UnknownStatus),
    (errors.OUT_OF_RANGE, "another server's words", UnknownStatus),
    (errors.UNIMPLEMENTED, _SERVICE, WrongPort),
    (errors.INTERNAL, "internal error", UnknownStatus),
    (errors.UNAVAILABLE, "error reading from server: EOF", ConnectionLost),
    (errors.UNAVAILABLE, f"{errors.SnapshotGivenUpError.text}: no room", errors.SnapshotGivenUpError),
    (errors.UNAVAILABLE, "the server is stopping", UnknownStatus),
    (errors.DATA_LOSS, "another server's words", UnknownStatus),
    (errors.UNAUTHENTICATED, "a proxy's words", UnknownStatus),
    (99, "x", UnknownStatus),
]
"""Statuses whose whole text is no row of the tree: each has a type by its beginning, or the fall-back."""


@pytest.mark.parametrize(("code", "text", "kind"), STATUSES)
def test_status_outside_the_table_has_a_type_and_keeps_code_and_text(code, text, kind):
    found = from_status(code, text)
    assert (type(found), found.code) == (kind, code)
    assert str(found) == _FRAME.format(errors.CODE_NAMES.get(code, "Code(99)"), text) or kind is not UnknownStatus
    assert copy.copy(found).code == code


def test_every_code_of_grpc_has_a_row():
    assert {row[0] for row in STATUSES} >= set(errors.CODE_NAMES) - {errors.OK}


def test_fall_back_keeps_definiteness_and_the_text_without_its_frame():
    error = from_status(errors.UNKNOWN, "auth: something", definite=True)
    assert isinstance(error, UnknownStatus)
    assert (error.desc, error.definite) == ("auth: something", True)


def test_request_that_is_too_large_names_the_limit_and_never_passes_by_itself():
    error = from_status(errors.RESOURCE_EXHAUSTED, "trying to send message larger than max (3000015 vs. 2097152)")
    assert isinstance(error, errors.RequestTooLargeError)
    assert "(3000015 vs. 2097152)" in str(error)
    assert "--max-request-bytes" in str(error)
    assert not is_transient(error, wait_for_room=True)


def test_message_that_is_too_large_to_be_received_may_have_been_executed():
    """A client says of a large answer what a member says of a large request: the key may be written."""
    error = from_status(errors.RESOURCE_EXHAUSTED, "grpc: received message larger than max (45 vs. 10)")
    assert not error.definite
    assert not is_transient(error, wait_for_room=True)


@pytest.mark.parametrize(("limit_bytes", "error"), [(2_000_000, MessageTooLarge), (4_000_000, EndpointsFailed)])
def test_put_above_the_limit_is_refused_before_anything_is_sent(limit_bytes, error):
    async def put():
        async with aio.connect("127.0.0.1:1", max_request_bytes=limit_bytes, timeout_s=0.01) as kv:
            await kv.put("k", bytes(3_000_000))

    with pytest.raises(error):
        asyncio.run(put())


def test_peer_port_error_names_the_client_port():
    text = str(from_status(errors.UNIMPLEMENTED, _SERVICE))
    assert text == f"{_SERVICE}: this is a peer port, or no member; clients use the URLs of --listen-client-urls"


def test_broken_connection_is_told_in_a_sentence():
    failed = EndpointsFailed({"a:1": "error reading from server: EOF"}, 5.0, definite=False)
    assert str(failed) == "no answer within 5 s from a:1: it closed the connection before it answered"
    for definite, outcome in ((True, "did not happen"), (False, "may have happened")):
        error = from_status(errors.UNAVAILABLE, "error reading from server: EOF", definite=definite)
        assert str(error) == f"the member closed the connection before it answered; the request {outcome}"
        assert isinstance(error, ConnectionError)


@given(st.binary(max_size=6), st.binary(max_size=4), st.binary(max_size=6))
def test_a_prefix_interval_holds_exactly_the_keys_with_the_prefix(prefix, suffix, other):
    end = prefix_end(prefix)

    def inside(key):
        return key >= prefix and (end == b"\0" or key < end)

    assert inside(prefix + suffix)
    assert inside(other) == (other.startswith(prefix) or (end == b"\0" and other >= prefix))
