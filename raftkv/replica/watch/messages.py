"""The bytes of watch responses, written by hand: an event is serialized once, however many watch it.

A response is ``header | watch_id | events`` (fields 1, 2, 11); header and events are shared by all watchers of a key,
only the few bytes of the id differ. See ``raftkv.apply.wire`` for why this is not done with protobuf objects.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from raftkv.apply.wire import field, integer
from raftkv.storage.key_value import KeyValueView, varint

_EVENTS: Final = b"\x5a"
_FRAGMENT: Final = b"\x38\x01"
_CREATED: Final = b"\x18\x01"
_CANCELED: Final = b"\x20\x01"
_DELETE: Final = b"\x08\x01"


def without_values(kv: bytes, is_delete: bool, prev_kv: bytes | None = None) -> bytes:
    """One element of field ``events`` for watchers that want keys alone; see ``event``."""
    previous = None if prev_kv is None else KeyValueView(prev_kv).without_value()
    return event(kv if is_delete else KeyValueView(kv).without_value(), is_delete, previous)


def event(kv: bytes, is_delete: bool, prev_kv: bytes | None = None) -> bytes:
    """One element of field ``events``: type=1, kv=2, prev_kv=3.

    Arguments:
        kv: serialized KeyValue; of a deletion: key and mod_revision alone.
        is_delete: whether the event is a deletion.
        prev_kv: the KeyValue before, for watchers that asked for it and where there was one.
    """
    body = b"\x12" + varint(len(kv)) + kv
    if is_delete:
        body = _DELETE + body
    if prev_kv is not None:
        body += b"\x1a" + varint(len(prev_kv)) + prev_kv
    return _EVENTS + varint(len(body)) + body


def id_field(watch_id: int) -> bytes:
    """Field ``watch_id``; nothing for 0."""
    return integer(2, watch_id)


def created(header: bytes, watch_id: int) -> bytes:
    """Make the answer to a create request that was accepted.

    Arguments:
        header: of the response.
        watch_id: of the new watcher.
    """
    return header + id_field(watch_id) + _CREATED


def refused(header: bytes, reason: str) -> bytes:
    """Make the answer to a create request that was refused: created and canceled at once, as in etcd.

    Arguments:
        header: of the response.
        reason: for people.
    """
    return header + id_field(-1) + _CREATED + _CANCELED + field(6, reason.encode())


def canceled(header: bytes, watch_id: int, reason: str = "") -> bytes:
    """Make the answer to a cancel request, or the end of a watcher that may not go on.

    Arguments:
        header: of the response.
        watch_id: of the watcher that ended.
        reason: for people; empty: the client asked for it.
    """
    return header + id_field(watch_id) + _CANCELED + (field(6, reason.encode()) if reason else b"")


def compacted(header: bytes, watch_id: int, compact_revision: int) -> bytes:
    """Make the end of a watcher that still needed history which is gone.

    Arguments:
        header: of the response.
        watch_id: of the watcher.
        compact_revision: up to where it is gone.
    """
    return header + id_field(watch_id) + _CANCELED + integer(5, compact_revision)


def fragments(start: bytes, events: list[bytes], size_bytes_max: int) -> Iterator[bytes]:
    """A response in pieces of at most ``size_bytes_max`` (or one event); all but the last say that more follows.

    Arguments:
        start: header and watch id, which every piece repeats.
        events: elements of field ``events``, in order.
    """
    piece: list[bytes] = []
    room = size_bytes_max - len(start)
    for element in events:
        if piece and len(element) > room:
            yield start + _FRAGMENT + b"".join(piece)
            piece, room = [], size_bytes_max - len(start)
        piece.append(element)
        room -= len(element)
    yield start + b"".join(piece)
