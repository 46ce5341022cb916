"""The format for programs: what Go's ``encoding/json`` makes of etcd's messages.

Owns three habits that scripts meet: numbers are numbers, even identifiers beyond 2^53; bytes are base64; fields with
the zero value are left out. An operation of a transaction sits under an extra ``"Response"``, as Go shows a oneof.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from raftkv.cli.output.printer import EndpointAnswer, EndpointHealth, Printer, write_line

if TYPE_CHECKING:
    from raftkv.pb import rpc_pb2

# Go escapes the first five so that the text may stand in a web page, and has no short form for the last two.
_GO_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
_GO_ESCAPES |= {"\\b": "\\u0008", "\\f": "\\u000c"}
_TOKEN = re.compile(r"\\.|[<>&\u2028\u2029]")
_TYPE_BYTES, _TYPE_MESSAGE = 12, 11


class JSONPrinter(Printer):
    """One line of JSON."""

    name = "json"

    def message(self, response: Any) -> None:
        write_line(encode(plain(response)))

    def member_list(self, response: rpc_pb2.MemberListResponse) -> None:
        if self.hexadecimal:
            write_line(encode(_hexadecimal_members(response)))
        else:
            self.message(response)

    def endpoint_health(self, answers: Sequence[EndpointHealth]) -> None:
        rows = []
        for answer in answers:
            row = {"endpoint": answer.endpoint, "health": answer.healthy, "took": answer.took}
            rows.append({**row, "error": answer.error} if answer.error else row)
        write_line(encode(rows))

    def endpoint_status(self, answers: Sequence[EndpointAnswer]) -> None:
        write_line(encode([{"Endpoint": a.endpoint, "Status": plain(a.response)} for a in answers]))

    def endpoint_hashkv(self, answers: Sequence[EndpointAnswer]) -> None:
        write_line(encode([{"Endpoint": a.endpoint, "HashKV": plain(a.response)} for a in answers]))

    def watch(self, answer: rpc_pb2.WatchResponse) -> None:
        made = answer.HasField("header")
        shown = {
            "Header": plain(answer.header) if made else {},
            "Events": [plain(event) for event in answer.events] if made else None,
            "CompactRevision": answer.compact_revision,
            "Canceled": answer.canceled,
            "Created": False,
        }
        write_line(encode(shown))

    # Go's structs of leases have the header's fields beside their own, and their own even if they are zero.

    def lease_grant(self, response: rpc_pb2.LeaseGrantResponse) -> None:
        row = {"ID": response.ID, "TTL": response.TTL, "Error": response.error}
        write_line(encode({**plain(response.header), **row}))

    def lease_keep_alive(self, response: rpc_pb2.LeaseKeepAliveResponse) -> None:
        write_line(encode({**plain(response.header), "ID": response.ID, "TTL": response.TTL}))

    def lease_time_to_live(self, response: rpc_pb2.LeaseTimeToLiveResponse, *, with_keys: bool) -> None:
        row: dict[str, Any] = {"id": response.ID, "ttl": response.TTL, "granted-ttl": response.grantedTTL}
        row["keys"] = [base64.b64encode(key).decode() for key in response.keys] or None
        write_line(encode({**plain(response.header), **row}))

    def lease_list(self, response: rpc_pb2.LeaseLeasesResponse) -> None:
        write_line(encode({**plain(response.header), "leases": [{"id": lease.ID} for lease in response.leases]}))


def encode(value: Any) -> str:
    """Compact JSON with Go's escapes."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return _TOKEN.sub(lambda token: _GO_ESCAPES.get(token[0], token[0]), text)


def plain(message: Any) -> dict[str, Any]:
    """Return a message as Go's struct of it: declared order, zero values left out."""
    out: dict[str, Any] = {}
    present = {field.name for field, _ in message.ListFields()}
    for field in message.DESCRIPTOR.fields:
        if field.name not in present:
            continue
        value = getattr(message, field.name)
        # Both kinds of repeated container have an ``extend``; no single value and no message of etcd's has.
        repeated = hasattr(value, "extend")
        shown: Any = [_scalar(field.type, item) for item in value] if repeated else _scalar(field.type, value)
        if field.containing_oneof is not None:
            out[field.containing_oneof.name.title()] = {field.name: shown}
        else:
            out[field.name] = shown
    return out


def _scalar(kind: int, value: Any) -> Any:
    if kind == _TYPE_MESSAGE:
        return plain(value)
    if kind == _TYPE_BYTES:
        return base64.b64encode(value).decode()
    return value


def _hexadecimal_members(response: rpc_pb2.MemberListResponse) -> dict[str, Any]:
    """Identifiers as hexadecimal text. Spelling and order are those of etcdctl 3.5, where this form is made by hand."""
    header = response.header
    members = [
        {"ID": f"{m.ID:x}", "name": m.name, "peerURLs": list(m.peerURLs), "clientURLS": list(m.clientURLs)}
        for m in response.members
    ]
    return {
        "header": {
            "cluster_id": f"{header.cluster_id:x}",
            "member_id": f"{header.member_id:x}",
            "raft_term": header.raft_term,
        },
        "members": members,
    }
