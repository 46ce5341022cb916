"""What is shown of an entry: who caused it, and none of its secrets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from raftkv.apply import wire
from raftkv.apply.membership import conf_change_of
from raftkv.apply.wire import MEMBER, Caller, Kind, identified, versioned
from raftkv.offline.log import line, row
from raftkv.pb import raft_pb2, rpc_pb2
from raftkv.raft import confchange
from raftkv.raft.types import Entry, EntryType
from raftkv.storage.wal import Found

ALICE = Caller("alicé".encode(), 7)
SECRET = "canary-of-a-password"
PUT = rpc_pb2.PutRequest(key=b"k", value=b"v").SerializeToString()
REMOVE = raft_pb2.MembershipChange(
    changes=[raft_pb2.MemberChange(kind=raft_pb2.MemberChange.REMOVE, member=rpc_pb2.Member(ID=2))],
    caller=raft_pb2.Caller(user=ALICE.user, auth_revision=ALICE.auth_revision),
)


def auth(**change: Any) -> bytes:
    return versioned(Kind.AUTH, raft_pb2.AuthChange(**change).SerializeToString())


def found(entry: Entry) -> Found:
    return Found(Path("0.wal"), 0, entry)


def shown(kind: int, body: bytes) -> tuple[str, dict[str, Any]]:
    return shown_entry(Entry(1, 2, wire.encode(kind, 5, body)))


def shown_entry(entry: Entry) -> tuple[str, dict[str, Any]]:
    return line(found(entry)), row(found(entry), json_format.MessageToDict)


def test_an_entry_shows_its_user_and_revision() -> None:
    text, fields = shown(Kind.IDENTIFIED, identified(ALICE, Kind.PUT, PUT))
    assert ": PUT id=5 by=user 'alicé' authRevision=7 key: \"k\"" in text
    assert (fields["kind"], fields["user"], fields["authRevision"]) == ("PUT", "alicé", 7)
    text, fields = shown(Kind.IDENTIFIED, identified(MEMBER, Kind.PUT, PUT))
    assert ": PUT id=5 by=member key" in text
    assert (fields["user"], fields["authRevision"]) == ("", 0)
    text, fields = shown(Kind.PUT, PUT)
    assert "by=" not in text
    assert "user" not in fields
    change = conf_change_of(REMOVE)
    entry = Entry(1, 2, confchange.encode(change), EntryType.CONF_CHANGE)
    text, fields = shown_entry(entry)
    assert "by=user 'alicé' authRevision=7" in text
    assert fields["user"] == "alicé"


@pytest.mark.parametrize(
    "change",
    [
        {"user_add": {"name": "bob", "password": SECRET, "hashedPassword": SECRET}},
        {"user_change_password": {"name": "bob", "password": SECRET, "hashedPassword": SECRET}},
        {"token_grant": {"user": b"bob", "token_sha256": SECRET.encode(), "auth_revision": 3}},
    ],
)
def test_an_entry_shows_no_hash_and_no_token(change: dict[str, Any]) -> None:
    for kind, body in ((Kind.AUTH, auth(**change)), (Kind.IDENTIFIED, identified(ALICE, Kind.AUTH, auth(**change)))):
        text, fields = shown(kind, body)
        assert "AUTH" in text
        assert "bob" in text
        assert SECRET not in text
        assert "canary" not in json.dumps(fields)
        assert "Y2FuYXJ5" not in json.dumps(fields), "base64"


def test_malformed_entry_is_shown_by_its_kind() -> None:
    for kind, body, expected in (
        (Kind.IDENTIFIED, b"", "MALFORMED_IDENTIFIED"),
        (Kind.IDENTIFIED, identified(ALICE, Kind.PUT, b"\xff"), "MALFORMED_PUT"),
        (Kind.IDENTIFIED, identified(ALICE, 200, b"\x09\x01"), "UNKNOWN_200"),
        (Kind.AUTH, b"\0", "MALFORMED_AUTH"),
        (Kind.HISTORY_QUOTA, b"", "MALFORMED_HISTORY_QUOTA"),
    ):
        assert f": {expected} id=5" in shown(kind, body)[0]
