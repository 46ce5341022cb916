"""Encoding of watch responses, by hand: an event is serialized once, however many watchers it has.

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
    """Return one element of field ``events`` for watchers that want only keys; see ``event``."""
    previous = None if prev_kv is None else KeyValueView(prev_kv).without_value()
    return event(kv if is_delete else KeyValueView(kv).without_value(), is_delete, previous)


def event(kv: bytes, is_delete: bool, prev_kv: bytes | None = None) -> bytes:
    """Return one element of field ``events``: type=1, kv=2, prev_kv=3.

    Arguments:
        kv: serialized KeyValue; of a deletion: only key and mod_revision.
        is_delete: whether the event is a deletion.
        prev_kv: the previous KeyValue, for watchers that requested it, if there was one.
    """
    body = b"\x12" + varint(len(kv)) + kv
    if is_delete:
        body = _DELETE + body
    if prev_kv is not None:
        body += b"\x1a" + varint(len(prev_kv)) + prev_kv
    return _EVENTS + varint(len(body)) + body


def id_field(watch_id: int) -> bytes:
    """Return field ``watch_id``; empty for 0."""
    return integer(2, watch_id)


def created(header: bytes, watch_id: int) -> bytes:
    """Return the response to a create request that was accepted.

    Arguments:
        header: response header.
        watch_id: id of the new watcher.
    """
    return header + id_field(watch_id) + _CREATED


def refused(header: bytes, reason: str) -> bytes:
    """Return the response to a create request that was refused: created and canceled at once, as in etcd.

    Arguments:
        header: response header.
        reason: readable text.
    """
    return header + id_field(-1) + _CREATED + _CANCELED + field(6, reason.encode())


def canceled(header: bytes, watch_id: int, reason: str = "") -> bytes:
    """Return the response to a cancel request, or the end of a watcher that may not continue.

    Arguments:
        header: response header.
        watch_id: id of the ended watcher.
        reason: readable text; empty: the client requested it.
    """
    return header + id_field(watch_id) + _CANCELED + (field(6, reason.encode()) if reason else b"")


def compacted(header: bytes, watch_id: int, compact_revision: int) -> bytes:
    """Return the end of a watcher that still needed compacted history.

    Arguments:
        header: response header.
        watch_id: id of the watcher.
        compact_revision: the compact revision.
    """
    return header + id_field(watch_id) + _CANCELED + integer(5, compact_revision)


def fragments(start: bytes, events: list[bytes], size_bytes_max: int) -> Iterator[bytes]:
    """Split a response into pieces of at most ``size_bytes_max`` (or one event); all but the last say that more
    follows.

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
