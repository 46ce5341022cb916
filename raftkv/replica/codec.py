"""Raft messages to and from the bytes that members exchange (``proto/raft.proto``).

Encoding is by hand, because a leader sends the same entries to every follower: the bytes of a run of entries are made
once and shared. Protobuf decodes; ``validate`` then refuses numbers that no member sends.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count, groupby, repeat
from operator import attrgetter
from typing import Final

from google.protobuf.message import DecodeError
from mypy_extensions import mypyc_attr

from raftkv.apply.wire import field, integer
from raftkv.pb import raft_pb2
from raftkv.raft.core import WITHOUT_TERM
from raftkv.raft.errors import InvalidMessage
from raftkv.raft.types import ConfState, Entry, EntryType, Message, MessageType, SnapshotMeta
from raftkv.storage.key_value import varint

BATCH_BYTES: Final = 1024 * 1024
"""Size at which a batch is closed; one raft message may be larger."""

MESSAGES_MAX: Final = 10_000
"""Maximum messages in a batch: a turn has a few hundred for one peer (``RaftConfig.max_inflight_messages``)."""
ENTRIES_MAX: Final = 1 << 17
"""Maximum entries in a batch: as many as two appends with the shortest entries, each of which counts 16 bytes in a
message (``RaftConfig.max_size_per_message_bytes``). Decoding them takes 35 ms."""

_type_of = attrgetter("type")
_SIZES_MAX: Final = 2048
_SIZES: Final = tuple(varint(size) for size in range(_SIZES_MAX))
_ENTRY_TYPES: Final = tuple(EntryType)
_MESSAGE_TYPES: Final = {int(kind): kind for kind in MessageType}


@mypyc_attr(allow_interpreted_subclasses=True)
class BatchEncoder:
    """Encodes the messages of one loop turn, remembering the last run of entries."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._entries_bytes = b""

    def batches(self, messages: Iterable[Message]) -> list[bytes]:
        """Return MessageBatches of at most about ``BATCH_BYTES`` each; usually one."""
        batches: list[bytes] = []
        parts: list[bytes] = []
        size_bytes = 0
        for message in messages:
            part = field(1, self._message(message))
            if parts and size_bytes + len(part) > BATCH_BYTES:
                batches.append(b"".join(parts))
                parts, size_bytes = [], 0
            parts.append(part)
            size_bytes += len(part)
        batches.append(b"".join(parts))
        return batches

    def _message(self, message: Message) -> bytes:
        parts = [
            integer(1, message.type),
            b"\x11" + message.to.to_bytes(8, "little"),
            b"\x19" + message.from_.to_bytes(8, "little"),
            integer(4, message.term),
            integer(5, message.log_term),
            integer(6, message.index),
        ]
        if message.entries:
            parts.append(self._runs(message.entries))
        parts.append(integer(8, message.commit))
        if message.reject:
            parts.append(b"\x48\x01" + integer(10, message.reject_hint))
        if message.snapshot is not None:
            parts.append(field(11, encode_snapshot_meta(message.snapshot).SerializeToString()))
        if message.context:
            parts.append(field(12, message.context))
        if message.quiet:
            parts.append(b"\x68\x01")
        return b"".join(parts)

    def _runs(self, entries: list[Entry]) -> bytes:
        # The core passes the same list for all followers at the same position.
        if entries is not self._entries:
            self._entries = entries
            self._entries_bytes = _encode_runs(entries)
        return self._entries_bytes


def _encode_runs(entries: list[Entry]) -> bytes:
    """Return field 7 of a Message, once for each run of entries with the same term and type."""
    first, last = entries[0], entries[-1]
    # Terms never decrease along a log, so equal ends mean equal terms throughout.
    if first.term == last.term and first.type == last.type == EntryType.NORMAL and not _has_conf_change(entries):
        return _encode_run(entries)
    grouped = groupby(entries, key=lambda entry: (entry.term, entry.type))
    return b"".join(_encode_run(list(run)) for _, run in grouped)


def _has_conf_change(entries: list[Entry]) -> bool:
    return any(map(_type_of, entries))


def _encode_run(entries: list[Entry]) -> bytes:
    first = entries[0]
    parts = [integer(1, first.term), integer(2, first.index), integer(3, first.type)]
    for entry in entries:
        data = entry.data
        size = len(data)
        parts += (b"\x22", _SIZES[size] if size < _SIZES_MAX else varint(size), data)
    body = b"".join(parts)
    return b"\x3a" + varint(len(body)) + body


def decode(batch: bytes) -> list[Message]:
    """Return the messages of a MessageBatch.

    Raises:
        google.protobuf.message.DecodeError: the bytes are not a batch that a member sends.
        KeyError: a message kind that this version does not know.
        IndexError: an entry kind that this version does not know.
    """
    return messages_of(raft_pb2.MessageBatch.FromString(batch))


def messages_of(batch: raft_pb2.MessageBatch) -> list[Message]:
    """Return the messages of a parsed batch.

    Raises:
        google.protobuf.message.DecodeError: the batch is not one that a member sends.
        KeyError: a message kind that this version does not know.
        IndexError: an entry kind that this version does not know.
    """
    if len(batch.messages) > MESSAGES_MAX:
        raise DecodeError(f"{len(batch.messages)} messages are more than a member sends at once")
    messages: list[Message] = []
    total = 0
    for each in batch.messages:
        message = _decode_message(each)
        messages.append(message)
        total += len(message.entries)
        if total > ENTRIES_MAX:
            raise _too_many_entries()
    return messages


def _too_many_entries() -> DecodeError:
    return DecodeError("it has more entries than a member sends at once")


def _decode_message(message: raft_pb2.Message) -> Message:
    return Message(
        type=_MESSAGE_TYPES[message.type],
        to=message.to_id,
        from_=message.from_id,
        term=message.term,
        log_term=message.log_term,
        index=message.index,
        entries=_decode_runs(message.runs),
        commit=message.commit,
        reject=message.reject,
        reject_hint=message.reject_hint,
        snapshot=decode_snapshot_meta(message.snapshot) if message.HasField("snapshot") else None,
        context=message.context,
        quiet=message.quiet,
    )


def _decode_runs(runs: Iterable[raft_pb2.EntryRun]) -> list[Entry]:
    entries: list[Entry] = []
    for run in runs:
        term, index, kind = run.term, run.first_index, _ENTRY_TYPES[run.type]
        datas = run.datas
        if len(entries) + len(datas) > ENTRIES_MAX:
            raise _too_many_entries()
        if entries:
            last = entries[-1]
            # A forwarded proposal has no position in the log yet: all its indexes are 0.
            if index != (last.index + 1 if last.index else 0) or term < last.term:
                raise DecodeError(f"entry {term}/{index} behind {last.term}/{last.index}")
        indexes: Iterable[int] = count(index) if index else repeat(0)
        entries += [Entry(term, at, data, kind) for at, data in zip(indexes, datas, strict=False)]
    return entries


def encode_snapshot_meta(meta: SnapshotMeta) -> raft_pb2.SnapshotMeta:
    """Return the wire form of a snapshot's log position."""
    return raft_pb2.SnapshotMeta(index=meta.index, term=meta.term, conf_state=encode_conf_state(meta.conf_state))


def decode_snapshot_meta(meta: raft_pb2.SnapshotMeta) -> SnapshotMeta:
    """Return the inverse of ``encode_snapshot_meta``."""
    return SnapshotMeta(meta.index, meta.term, decode_conf_state(meta.conf_state))


def encode_conf_state(state: ConfState) -> raft_pb2.ConfState:
    """Return the wire form of a configuration."""
    return raft_pb2.ConfState(
        voters=state.voters,
        learners=state.learners,
        voters_outgoing=state.voters_outgoing,
        learners_next=state.learners_next,
        auto_leave=state.auto_leave,
    )


def decode_conf_state(state: raft_pb2.ConfState) -> ConfState:
    """Return the inverse of ``encode_conf_state``."""
    return ConfState(
        voters=tuple(state.voters),
        learners=tuple(state.learners),
        voters_outgoing=tuple(state.voters_outgoing),
        learners_next=tuple(state.learners_next),
        auto_leave=state.auto_leave,
    )


# -- plausible ------------------------------------------------------------------------------------------------------
#
# Validation of messages: ``validate(message, node_term)`` raises InvalidMessage for damage and forgeries.
#
# The Raft core accepts any message that follows the rules of Raft, as etcd's does: tests step terms into it that no
# election reached. Between members such a number is damaged or forged: the largest possible term would leave no further
# terms, and a log that ends with it would win every election.

TERMS_AHEAD_MAX = 1 << 32
"""Maximum difference by which a message's term may exceed the member's: a century of elections, one per second. A
larger difference must be forged, and a few such messages would leave no further terms."""


def validate(message: Message, node_term: int) -> None:
    """Check the terms in a message of another member.

    Arguments:
        message: the received message.
        node_term: term of the receiving member.

    Raises:
        InvalidMessage: no member sends such a message.
    """
    term = message.term
    if not term and message.type not in WITHOUT_TERM:
        raise InvalidMessage("it has no term: the core would take it for this member's own")
    if term > node_term + TERMS_AHEAD_MAX:
        raise InvalidMessage(f"term {term} is too far ahead of {node_term}")
    if not term:
        return
    if message.entries and message.entries[-1].term > term:
        raise InvalidMessage(f"a message of term {term} carries {message.entries[-1]!r}")
    if message.log_term > term or (message.snapshot is not None and message.snapshot.term > term):
        raise InvalidMessage(f"a message of term {term} tells of a log with a later one")
