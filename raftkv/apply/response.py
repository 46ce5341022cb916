"""Bytes of responses, written by hand where protobuf objects would only be passed through.

A stored ``mvccpb.KeyValue`` is already in its wire form, and a message inside a message is its bytes behind a tag and
a length. So a response is put together by concatenation, several times faster than building message objects.

    >>> field(2, b"ab")
    b'\\x12\\x02ab'
    >>> varint(300)
    b'\\xac\\x02'

A *body* below is a response without its header: the header names the answering member and its term, which must not
take part in applying. ``HeaderEncoder`` makes it, and ``header + body`` is the response.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from itertools import chain
from typing import Final

from raftkv.storage.key_value import varint

DROPPED_BYTES: Final = 4 * 1024 * 1024
"""Bytes that are freed at once: giving memory back to the system takes about 0.2 ms a MiB."""
DROPPED_PIECES: Final = 4000

_TAGS: Final = tuple(bytes((number,)) for number in range(128))


def field(number: int, value: bytes) -> bytes:
    """Return a length-delimited field.

    Arguments:
        number: of the field, below 16.
        value: its bytes.
    """
    return _TAGS[number << 3 | 2] + varint(len(value)) + value


def head(number: int, size_bytes: int) -> bytes:
    """Return what comes before the bytes of a length-delimited field.

    Arguments:
        number: of the field, below 16.
        size_bytes: number of its bytes.
    """
    return _TAGS[number << 3 | 2] + varint(size_bytes)


def integer(number: int, value: int) -> bytes:
    """Return an integer or boolean field, nothing when it is zero.

    Arguments:
        number: of the field, below 16.
        value: its value.
    """
    return _TAGS[number << 3] + varint(value) if value else b""


def drop(pieces: list[bytes]) -> Generator[None, None, None]:
    """Free an answer that is not sent, with a pause after some of it: 512 MiB at once would hold the loop for 0.1 s.

    Arguments:
        pieces: emptied; no other owner has them.
    """
    while pieces:
        size_bytes = count = 0
        while pieces and size_bytes < DROPPED_BYTES and count < DROPPED_PIECES:
            size_bytes += len(pieces.pop())
            count += 1
        yield


def range_body(kvs: Iterable[bytes], more: bool, count: int) -> bytes:
    """Return the body of a RangeResponse: fields kvs=2, more=3, count=4.

    Arguments:
        kvs: serialized KeyValues.
        more: whether the limit left any out.
        count: keys of the interval.
    """
    parts = [field(2, kv) for kv in kvs]
    parts.append(range_end(more, count))
    return b"".join(parts)


def range_kvs(kvs: Iterable[bytes]) -> bytes:
    """Return the KeyValues of a RangeResponse, or some of them: the body may be put together from pieces."""
    # Many parts and one join: ``field`` would copy each of them once more.
    return b"".join(chain.from_iterable([(b"\x12", varint(len(kv)), kv) for kv in kvs]))


def range_end(more: bool, count: int) -> bytes:
    """Return the rest of the body of a RangeResponse.

    Arguments:
        more: whether the limit left any out.
        count: keys of the interval.
    """
    return (b"\x18\x01" if more else b"") + integer(4, count)


def put_body(prev_kv: bytes | None) -> bytes:
    """Return the body of a PutResponse: field prev_kv=2."""
    return b"" if prev_kv is None else field(2, prev_kv)


def delete_range_body(deleted: int, prev_kvs: Iterable[bytes]) -> bytes:
    """Return the body of a DeleteRangeResponse: fields deleted=2, prev_kvs=3.

    Arguments:
        deleted: number of keys.
        prev_kvs: serialized KeyValues, if they were asked for.
    """
    return integer(2, deleted) + b"".join(field(3, kv) for kv in prev_kvs)


def txn_body(succeeded: bool, responses: Iterable[bytes]) -> bytes:
    """Return the body of a TxnResponse: fields succeeded=2, responses=3.

    Arguments:
        succeeded: whether all compares held.
        responses: serialized ResponseOps, in order.
    """
    return (b"\x10\x01" if succeeded else b"") + b"".join(field(3, response) for response in responses)


def revision_header(revision: int) -> bytes:
    """Return the header of a response inside a txn, which carries only the revision."""
    return field(1, integer(3, revision))


EMPTY_HEADER: Final = field(1, b"")
"""The header of a nested txn's response."""


class HeaderEncoder:
    """An encoder of the header field of this member's responses.

    Arguments:
        cluster_id: of the cluster.
        member_id: of the answering member.
    """

    def __init__(self, cluster_id: int, member_id: int) -> None:
        self._prefix = integer(1, cluster_id) + integer(2, member_id)
        self._revision = self._term = 0
        self._term_field = self._encoded = b""

    def encode(self, revision: int, term: int) -> bytes:
        """Return field 1 of a response: cluster id, member id, revision, term.

        Arguments:
            revision: main revision of the store.
            term: Raft term of this member.
        """
        if term != self._term:
            self._term = term
            self._term_field = integer(4, term)
        elif revision == self._revision and self._encoded:  # reads of one moment
            return self._encoded
        self._revision = revision
        fields = self._prefix + (b"\x18" + varint(revision) if revision else b"") + self._term_field
        self._encoded = bytes((0x0A, len(fields))) + fields  # four numbers take less than 128 bytes
        return self._encoded
