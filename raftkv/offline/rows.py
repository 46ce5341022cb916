"""What a log holds, for people and for programs: a line or a row for each record.

A line is ``describe_found``'s, and for an entry what it asks for, up to ``TEXT_MAX`` characters of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from google.protobuf import text_format

from raftkv.apply.auth.caller import Caller
from raftkv.offline.log import decode
from raftkv.raft.types import Entry, HardState, SnapshotMeta
from raftkv.storage.wal import Found, describe_found
from raftkv.storage.wal.frame import Frame
from raftkv.storage.wal.record import Metadata, SegmentHead
from raftkv.storage.wal.tail import Tail

TEXT_MAX: Final = 400
"""Characters of a request that a line shows."""


def line(found: Found) -> str:
    """Return the line of one thing in a log."""
    text = describe_found(found)
    if not isinstance(found.what, Entry):
        return text
    decoded = decode(found.what)
    body = "" if decoded.message is None else text_format.MessageToString(decoded.message, as_one_line=True)
    caller = "" if decoded.caller is None else describe(decoded.caller)
    shown = " ".join(filter(None, (decoded.kind, f"id={decoded.request_id:x}", caller, decoded.text, body)))
    return f"{text}: {shown[:TEXT_MAX] + '...' if len(shown) > TEXT_MAX else shown}"


def describe(caller: Caller) -> str:
    """Return who caused an entry, and under which revision of users and roles."""
    if not caller.user:
        return "by=member"
    name = caller.user.decode("utf-8", "backslashreplace")
    return f"by=user {name!r} authRevision={caller.auth_revision}"


def row(found: Found, plain: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """Return one thing in a log as names and values that JSON has.

    Arguments:
        found: it.
        plain: makes such values of a message.
    """
    return {"segment": str(found.segment), "offset": found.offset, **_fields(found, plain)}


def _fields(found: Found, plain: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    match found.what:
        case int(size_bytes):
            return {"record": "segment", "sizeBytes": size_bytes}
        case Frame(header=header, crc=crc):
            return {"record": "frame", "sizeBytes": header.length, "durable": header.durable, "crc": crc}
        case Entry() as entry:
            return _entry(entry, plain)
        case HardState() as state:
            return {"record": "hardState", "term": state.term, "vote": state.vote, "commit": state.commit}
        case SnapshotMeta() as meta:
            voters, learners = meta.conf_state.voters, meta.conf_state.learners
            point = {"record": "marker", "term": meta.term, "index": meta.index}
            return {**point, "voters": list(voters), "learners": list(learners)}
        case Metadata(data):
            return {"record": "metadata", "data": data.hex()}
        case SegmentHead() as head:
            row = {"record": "head", "sequence": head.sequence, "firstIndex": head.first_index}
            return {**row, "version": head.version}
        case Tail(verdict, reason):
            return {"record": "tail", "verdict": verdict.value, "reason": reason}


def _entry(entry: Entry, plain: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    decoded = decode(entry)
    row = {"record": "entry", "term": entry.term, "index": entry.index, "type": entry.type.name}
    row |= {"sizeBytes": len(entry.data), "kind": decoded.kind, "requestId": decoded.request_id}
    if decoded.caller is not None:
        user = decoded.caller.user.decode("utf-8", "backslashreplace")
        row |= {"user": user, "authRevision": decoded.caller.auth_revision}
    if decoded.text:
        row["change"] = decoded.text
    return row if decoded.message is None else {**row, "body": plain(decoded.message)}
