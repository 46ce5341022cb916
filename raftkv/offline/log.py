"""A member's log, or archived segments of one, read without changing anything, even while the member runs.

    verified = verify("default.etcd/member/wal")     # verifies the whole checksum chain, and summarises the log
    for found in contents(...): ...

A *running* member changes the log during the read: the last segment grows, so a frame may be incomplete; and the oldest
segments may be deleted. Both are temporary, so the log is read again before they are reported as damage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf import text_format
from google.protobuf.message import DecodeError

from raftkv.apply import wire
from raftkv.apply.applier import PARSERS
from raftkv.apply.wire import Caller, PlainPut, PlainTxn
from raftkv.errors import MalformedEntryError
from raftkv.offline.directory import is_running
from raftkv.pb import raft_pb2
from raftkv.raft import confchange
from raftkv.raft.describe import describe_conf_change
from raftkv.raft.errors import ConfChangeError
from raftkv.raft.types import Entry, EntryType, HardState, SnapshotMeta
from raftkv.storage.wal import Found, ReadingDisk, WALCorruptError, describe_found, walk
from raftkv.storage.wal.record import Frame, Metadata, SegmentHead
from raftkv.storage.wal.recovery import Recovery
from raftkv.storage.wal.segment import list_segments
from raftkv.storage.wal.tail import Tail

SECRETS: Final = frozenset(("password", "hashedPassword", "token_sha256"))
"""Names of fields that are never shown."""

LOOKS_MAX: Final = 5
"""Number of times that a log in use is read before an error in it is reported."""


@dataclass(frozen=True, slots=True)
class Verified:
    """Summary of a whole log.

    Attributes:
        cluster_id, member_id: ids of its cluster and member.
        segments: number of its files.
        size_bytes: total allocated size of the files.
        first_index, last_index: of the kept entries; ``last_index`` is below ``first_index`` if there are none.
        hard_state: the last hard state.
        markers: markers of saved states, oldest first.
        torn: description of a torn tail, which the next start cuts off; empty: none.
    """

    cluster_id: int
    member_id: int
    segments: int
    size_bytes: int
    first_index: int
    last_index: int
    hard_state: HardState
    markers: tuple[SnapshotMeta, ...]
    torn: str


def verify(directory: str) -> Verified:
    """Read every byte of a log and check that it is one valid chain.

    Arguments:
        directory: directory of the log.

    Raises:
        WALCorruptError: the log is damaged; the message says where and how.
        WALVersionError: the log has another format.
    """
    disk = ReadingDisk()
    for look in range(LOOKS_MAX):
        try:
            return _verify(disk, directory)
        except (WALCorruptError, FileNotFoundError):
            if look == LOOKS_MAX - 1 or not is_running(directory):
                raise
    raise AssertionError("the last look returns or raises")


def _verify(disk: ReadingDisk, directory: str) -> Verified:
    names = list_segments(disk, directory)
    recovery = Recovery(disk, directory, names)
    found = recovery.result(None)
    owner = raft_pb2.WALMetadata.FromString(found.metadata)
    entries = recovery.replay.entries
    return Verified(
        owner.cluster_id,
        owner.member_id,
        len(names),
        recovery.total_bytes,
        entries[0].index if entries else recovery.replay.last_index + 1,
        recovery.replay.last_index,
        found.hard_state,
        found.markers,
        "" if is_running(directory) else recovery.torn or "",
    )


def contents(directory: str, start: int = 0, end: int | None = None) -> Iterator[Found]:
    """Iterate over the contents of a log, in order.

    Arguments:
        directory: directory of the log.
        start, end: entries before ``start`` and from ``end`` on are left out, with frames that have no other entries.

    Raises:
        WALCorruptError: the rest cannot be read.
    """
    for found in walk(directory, ReadingDisk()):
        entry = found.what
        if isinstance(entry, Entry) and (entry.index < start or (end is not None and entry.index >= end)):
            continue
        yield found


@dataclass(frozen=True, slots=True)
class Decoded:
    """The request of an entry.

    Attributes:
        kind: name of the request, or why the entry cannot be read.
        request_id: id by which the proposing member found its waiter; 0: none.
        message: the request; ``None``: none, or of a kind unknown to this version.
        text: description of a membership change; otherwise empty.
        caller: the calling user, if authentication was enabled.
    """

    kind: str
    request_id: int = 0
    message: Any = None
    text: str = ""
    caller: Caller | None = None


def decode(entry: Entry) -> Decoded:
    """Return the request of an entry; its bytes may be anything."""
    if entry.type != EntryType.NORMAL:
        return _decode_conf_change(entry.data)
    if not entry.data:
        return Decoded("EMPTY")
    request = wire.decode(entry.data)
    if request is None:
        return Decoded("MALFORMED")
    kind, request_id, body = request
    caller = None
    if kind == wire.Kind.IDENTIFIED:
        try:
            caller, kind, body = wire.decode_identified(body)
        except MalformedEntryError:
            return Decoded("MALFORMED_IDENTIFIED", request_id)
    parse = PARSERS.get(kind)
    if parse is None:
        return Decoded(f"UNKNOWN_{kind}", request_id, caller=caller)
    name = wire.Kind(kind).name
    try:
        return Decoded(name, request_id, _without_secrets(kind, parse(body)), caller=caller)
    except (DecodeError, MalformedEntryError):
        return Decoded(f"MALFORMED_{name}", request_id, caller=caller)


def _without_secrets(kind: int, message: Any) -> Any:
    """Return a request as a message that may be shown: without hashes of passwords and tokens."""
    if isinstance(message, (PlainPut, PlainTxn)):
        return message.message()
    if kind == wire.Kind.AUTH:
        for _, change in message.ListFields():
            for secret in SECRETS & set(change.DESCRIPTOR.fields_by_name):
                change.ClearField(secret)
    return message


def _decode_conf_change(data: bytes) -> Decoded:
    try:
        change = confchange.decode(data)
    except ConfChangeError:
        return Decoded("MALFORMED_CONF_CHANGE")
    if change.context:
        try:
            context = raft_pb2.MembershipChange.FromString(change.context)
        except DecodeError:
            return Decoded("CONF_CHANGE", text=describe_conf_change(change))
        steps = describe_conf_change(change).partition(" context=")[0]
        caller = Caller(context.caller.user, context.caller.auth_revision) if context.HasField("caller") else None
        return Decoded("CONF_CHANGE", context.request_id, context, steps, caller)
    return Decoded("CONF_CHANGE", text=describe_conf_change(change))


# -- rows -----------------------------------------------------------------------------------------------------------
#
# A line (readable) or a row (for programs) for each record of a log. A line is ``describe_found``'s, followed for an
# entry by its request, up to ``TEXT_MAX`` characters of it.

TEXT_MAX: Final = 400
"""Maximum number of characters of a request in a line."""


def line(found: Found) -> str:
    """Return the line for one item of a log."""
    text = describe_found(found)
    if not isinstance(found.what, Entry):
        return text
    decoded = decode(found.what)
    body = "" if decoded.message is None else text_format.MessageToString(decoded.message, as_one_line=True)
    caller = "" if decoded.caller is None else describe(decoded.caller)
    shown = " ".join(filter(None, (decoded.kind, f"id={decoded.request_id:x}", caller, decoded.text, body)))
    return f"{text}: {shown[:TEXT_MAX] + '...' if len(shown) > TEXT_MAX else shown}"


def describe(caller: Caller) -> str:
    """Return a description of the caller of an entry, with its revision of users and roles."""
    if not caller.user:
        return "by=member"
    name = caller.user.decode("utf-8", "backslashreplace")
    return f"by=user {name!r} authRevision={caller.auth_revision}"


def row(found: Found, plain: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """Return one item of a log as a dictionary of JSON values.

    Arguments:
        found: the item.
        plain: converts a message to such a dictionary.
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
