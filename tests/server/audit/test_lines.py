"""A line of the audit log shows its request without secrets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from raftkv.pb import rpc_pb2, services
from raftkv.server.audit.calls import _READS, _WRITES, Level, level_of
from raftkv.server.audit.lines import (
    ITEMS_MAX,
    METHODS,
    SHOWN,
    TEXT_BYTES_MAX,
    Record,
    _Budget,
    certificate_text,
    line,
    parsed,
    subject,
)
from raftkv.server.audit.trail import RECORD_BYTES, AuditTrail

PUT = "/etcdserverpb.KV/Put"
CANARY = "c4n4ry"


def shown(record: Record) -> dict[str, Any]:
    data = line(record, "m1")
    assert data.endswith(b"\n")
    assert data.count(b"\n") == 1
    assert data.isascii()
    found = json.loads(data)
    assert isinstance(found, dict)
    return found


def test_line_names_user_request_and_outcome() -> None:
    request = rpc_pb2.PutRequest(key=b"job/1", value=b"x", lease=7).SerializeToString()
    header = rpc_pb2.ResponseHeader(cluster_id=2**64 - 1, member_id=2**63, revision=12, raft_term=2**63)
    answer = rpc_pb2.PutResponse(header=header).SerializeToString()
    record = Record(1.5, "call", "10.0.0.1:42", b"alice", PUT, request, 0, answer[:64], 0.0012345)
    assert shown(record) == {
        "time": "1970-01-01T00:00:01.500000Z",
        "member": "m1",
        "event": "call",
        "remote": "10.0.0.1:42",
        "user": "alice",
        "method": "etcdserverpb.KV/Put",
        "request": {"key": "job/1", "lease": 7},
        "outcome": "OK",
        "revision": 12,
        "duration_ms": 1.234,
    }


def test_no_server_and_a_refusal() -> None:
    found = shown(Record(1.0, "call", "a:1", b"", PUT, b"", 7))
    assert (found["user"], found["outcome"]) == (None, "PERMISSION_DENIED")
    assert "revision" not in found
    assert shown(Record(1.0, "call", "a:1", b"\xff\n", PUT, b"", 99))["outcome"] == "99"


def test_certificate_is_logged_without_auth_too() -> None:
    certificate = {
        "subject": ((("commonName", "alice"),),),
        "serialNumber": "0A1B",
        "issuer": ((("commonName", "ca"),),),
    }
    found = shown(Record(1.0, "call", "a:1", b"", PUT, b"", 0, certificate=certificate_text(certificate)))
    assert (found["user"], found["certificate"]) == (None, {"name": "alice", "serial": "0A1B"})


def test_a_record_keeps_little_of_a_certificate() -> None:
    """Records wait while the disk is full, with what they hold: each may be of a connection of its own."""
    names = tuple(("DNS", f"host-{number}.example") for number in range(5_000))
    certificate = {"subject": ((("commonName", "n" * 50_000),),), "serialNumber": "A" * 40, "subjectAltName": names}
    text = certificate_text(certificate)
    assert json.loads(text) == {"name": "n" * TEXT_BYTES_MAX, "serial": "A" * 40}
    memory = SimpleNamespace(write=lambda lines: None, close=lambda: None)
    trail = AuditTrail(memory, "m1")
    trail.close()
    trail.add(Record(1.0, "call", "a:1", certificate=text))
    ((record, size_bytes),) = trail._records
    assert size_bytes == RECORD_BYTES + len(text)
    assert not certificate_text(None)
    assert isinstance(record.certificate, str)


@pytest.mark.parametrize(
    ("key", "end", "expected"),
    [
        (b"a", b"", {"key": "a"}),
        (b"a/", b"a0", {"prefix": "a/"}),
        (b"a", b"c", {"key": "a", "range_end": "c"}),
        (b"a", b"\0", {"key": "a", "range_end": "\\x00"}),
        (b"\xff", b"\0", {"key": "\\xff", "range_end": "\\x00"}),
        (b"a\xff", b"b", {"key": "a\\xff", "range_end": "b"}),
        (b'"\\\n\x1b[2J\xc3\xa4', b"", {"key": '"\\\\\\n\\x1b[2J\\xc3\\xa4'}),
        (b"k" * 300, b"", {"key": "k" * TEXT_BYTES_MAX, "key_bytes": 300}),
        (b"k" * 300, b"k" * 299 + b"l", {"prefix": "k" * TEXT_BYTES_MAX, "prefix_bytes": 300}),
    ],
)
def test_intervals(key: bytes, end: bytes, expected: dict[str, Any]) -> None:
    assert subject(rpc_pb2.RangeRequest(key=key, range_end=end)) == expected


def test_a_txn_shows_its_keys_up_to_a_number() -> None:
    inner = rpc_pb2.TxnRequest(success=[rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=b"n", value=b"v"))])
    txn = rpc_pb2.TxnRequest(
        compare=[rpc_pb2.Compare(key=b"c", value=b"secret")],
        success=[
            rpc_pb2.RequestOp(request_txn=inner),
            rpc_pb2.RequestOp(request_delete_range=rpc_pb2.DeleteRangeRequest(key=b"d/", range_end=b"d0")),
        ],
        failure=[rpc_pb2.RequestOp(request_range=rpc_pb2.RangeRequest(key=b"r"))],
    )
    assert subject(txn) == {
        "compare": [{"key": "c"}],
        "success": [
            {"request_txn": {"success": [{"request_put": {"key": "n"}}]}},
            {"request_delete_range": {"prefix": "d/"}},
        ],
        "failure": [{"request_range": {"key": "r"}}],
    }
    put = rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=b"k"))
    found = subject(rpc_pb2.TxnRequest(success=[put] * 1000))
    assert (len(found["success"]), found["omitted"]) == (ITEMS_MAX, 1000 - ITEMS_MAX)
    members = subject(rpc_pb2.MemberAddRequest(peerURLs=["u" * 1000] * 100))
    assert members == {"peerURLs": ["u" * TEXT_BYTES_MAX] * ITEMS_MAX, "omitted": 100 - ITEMS_MAX}


def test_bytes_that_are_no_request() -> None:
    assert parsed(PUT, b"\xff\xff") == {"malformed_bytes": 2}
    assert parsed("/no.Such/Method", b"\xff") == {}


def test_a_request_on_a_stream_that_asks_for_nothing_has_no_line() -> None:
    progress = rpc_pb2.WatchRequest(progress_request=rpc_pb2.WatchProgressRequest()).SerializeToString()
    assert line(Record(1.0, "request", method="/etcdserverpb.Watch/Watch", request=progress), "m") == b""
    cancel = rpc_pb2.WatchRequest(cancel_request=rpc_pb2.WatchCancelRequest(watch_id=5)).SerializeToString()
    found = shown(Record(1.0, "request", method="/etcdserverpb.Watch/Watch", request=cancel))
    assert found["request"] == {"cancel_request": {"watch_id": 5}}


def _filled(message: Message, depth: int = 3) -> Message:
    """Put the canary into every text that a line must not show, however deep."""
    for field in message.DESCRIPTOR.fields:
        _fill(message, field, depth)
    return message


def _fill(message: Any, field: FieldDescriptor, depth: int) -> None:
    if field.message_type is not None:
        if depth and (field.is_repeated or field.containing_oneof is None):
            holder = getattr(message, field.name)
            _filled(holder.add() if field.is_repeated else holder, depth - 1)
        return
    if field.type not in (FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_STRING):
        return
    text = "shown" if field.name in SHOWN else CANARY
    value = text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
    if field.is_repeated:
        getattr(message, field.name).append(value)
    else:
        setattr(message, field.name, value)


def test_no_method_shows_a_secret() -> None:
    for path, method in METHODS.items():
        request = _filled(method.request()).SerializeToString()
        found = line(Record(1.0, "call", "a:1", b"u", path, request, 0), "m1")
        assert CANARY.encode() not in found, path


def test_secrets_are_no_shown_fields() -> None:
    assert not SHOWN & {"value", "password", "hashedPassword", "token", "blob"}
    names = {field.name for method in METHODS.values() for field in method.request.DESCRIPTOR.fields}
    assert {"password", "hashedPassword", "value"} <= names


def test_every_method_has_a_level_and_unknown_ones_are_always_noted() -> None:
    assert set(METHODS) >= _READS | _WRITES
    assert not _READS & _WRITES
    assert level_of("/raftkv.New/Method") == Level.AUTH
    always = {path for path in METHODS if level_of(path) == Level.AUTH and not path.startswith("/raftkvpb.Peer/")}
    assert {path.rpartition("/")[2] for path in always} == {
        *("AuthEnable", "AuthDisable", "Authenticate", "UserAdd", "UserDelete", "UserChangePassword"),
        *("UserGrantRole", "UserRevokeRole", "RoleAdd", "RoleDelete", "RoleGrantPermission", "RoleRevokePermission"),
        *("MemberAdd", "MemberRemove", "MemberUpdate", "MemberPromote", "MemberReplace"),
        *("Alarm", "Defragment", "Snapshot", "MoveLeader", "Downgrade", "QuotaSet", "QuotaRemove", "LimitSet"),
    }
    assert services.SERVICES


def test_omitted_parts_of_a_long_list_are_not_read() -> None:
    """A request has up to a million texts, and is looked into on the loop."""
    looked_at = 0

    class Texts(list[str]):
        def __iter__(self) -> Iterator[str]:
            nonlocal looked_at
            for text in super().__iter__():
                looked_at += 1
                yield text

    budget = _Budget()
    assert len(list(budget.take(Texts(["x"] * 1000)))) == ITEMS_MAX
    assert (budget.omitted, looked_at) == (1000 - ITEMS_MAX, ITEMS_MAX + 1)
