"""Transfer between a program and a holder: one request per connection, a short JSON head, then the bytes.

::

    send(holder, copy, [view, view])                    # returns when the holder has all bytes and verified the digest
    data = receive(copy, size_bytes)                    # not verified: the caller compares the digest

A head is four bytes with the length of a JSON object, then the object. Blocking: programs with an event loop call this
on a thread. Every failure of a holder is a ``StorageError``, after which the caller tries the next copy or holder.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from raftkv.checkpoint.errors import StorageError, printable

if TYPE_CHECKING:
    from raftkv.checkpoint.records import CopyRecord, HolderRecord

MAGIC: Final = b"RKC1"
HEAD: Final = struct.Struct(">4sI")
HEAD_MAX_BYTES: Final = 4096
PIECE_BYTES: Final = 1 << 20
CONNECT_TIMEOUT_S: Final = 2.0
IDLE_TIMEOUT_S: Final = 10.0
"""Time without progress after which a transfer is abandoned."""
PACE_BYTES_PER_S: Final = 4 << 20
"""Minimum average speed of a transfer; a slower one, as with a broken network card, is abandoned for another holder."""


def encode(head: Mapping[str, Any]) -> bytes:
    """Return a head, prefixed with its length."""
    data = json.dumps(head, separators=(",", ":")).encode()
    return HEAD.pack(MAGIC, len(data)) + data


def length_of(prefix: bytes) -> int:
    """Return the length of the following head. Raises ValueError if it is not valid or too long."""
    magic, length = HEAD.unpack(prefix)
    if magic != MAGIC or length > HEAD_MAX_BYTES:
        raise ValueError("the other end is not a holder of raftkv checkpoint copies")
    return int(length)


def decode(data: bytes) -> dict[str, Any]:
    """Decode a head. Raises ValueError."""
    head = json.loads(data)
    if not isinstance(head, dict):
        raise ValueError("not an object")
    return head


def memory_of(size_bytes: int) -> mmap.mmap:
    """Return writable memory of at least one byte, which is only allocated when it is written."""
    memory = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # the kernel may know no huge pages: filling small ones costs more than TCP
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def memory_limit_bytes() -> int:
    """Return half of this machine's memory, the default limit of a reader."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def patience_s(size_bytes: int) -> float:
    """Return the time limit for a number of bytes."""
    return IDLE_TIMEOUT_S + size_bytes / PACE_BYTES_PER_S


def send(holder: HolderRecord, copy: Mapping[str, Any], parts: Sequence[memoryview]) -> None:
    """Send a copy to a holder; returns when the holder has verified its digest and announced it.

    Arguments:
        holder: which.
        copy: ``kind``, ``step``, ``generation``, ``number``, ``file``, ``digest``, ``size_bytes``, and the ``secret``
            of ``Attempt.offer``.
        parts: the bytes, one after the other.

    Raises:
        StorageError: it could not be reached, or did not take it.
    """
    with _asked(holder.address, {"do": "put", "token": holder.token, **copy}, sum(map(len, parts))) as (link, answer):
        if not answer.get("has"):
            for part in parts:
                link.send(part)
            link.answer()


def receive(copy: CopyRecord, size_bytes: int) -> memoryview:
    """Return the bytes of a copy, without verification.

    Arguments:
        copy: the claim of its holder.
        size_bytes: what the committed list of files says; no more is allocated or read.

    Raises:
        StorageError: the holder could not be reached, or has fewer bytes.
    """
    asked = {"do": "get", "token": copy.token, "digest": copy.digest}
    with _asked(copy.address, asked, size_bytes) as (link, answer):
        if answer.get("size_bytes") != size_bytes:
            raise StorageError(f"{copy.address} does not have {size_bytes} bytes of it")
        view = memoryview(memory_of(size_bytes))[:size_bytes]
        link.fill(view)
        return view


@contextmanager
def _asked(address: str, head: Mapping[str, Any], size_bytes: int) -> Iterator[tuple[_Link, dict[str, Any]]]:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = _Link(connection, size_bytes)
            link.send(memoryview(encode(head)))
            yield link, link.answer()
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        raise StorageError(printable(f"the holder of copies at {address}: {error}")) from error


class _Link:
    """A connection to a holder, abandoned if there is no progress or the transfer is too slow.

    Arguments:
        connection: open connection.
        size_bytes: size of the data that is sent or received.
    """

    def __init__(self, connection: socket.socket, size_bytes: int) -> None:
        self._connection = connection
        self._ends_at_s = time.monotonic() + patience_s(size_bytes)

    def _wait_no_longer(self) -> None:
        left_s = self._ends_at_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"it moves less than {PACE_BYTES_PER_S} bytes a second")
        self._connection.settimeout(min(left_s, IDLE_TIMEOUT_S))

    def send(self, data: memoryview) -> None:
        """Send in pieces, because ``sendall`` has one time limit for all its data."""
        for start in range(0, len(data), PIECE_BYTES):
            self._wait_no_longer()
            self._connection.sendall(data[start : start + PIECE_BYTES])

    def answer(self) -> dict[str, Any]:
        """Return the next head. Raises ValueError if it reports an error or is not valid."""
        answer = decode(self._exactly(length_of(self._exactly(HEAD.size))))
        if "error" in answer:
            raise ValueError(str(answer["error"])[:200])
        return answer

    def _exactly(self, count: int) -> bytes:
        data = bytearray(count)
        self.fill(memoryview(data))
        return bytes(data)

    def fill(self, view: memoryview) -> None:
        """Receive bytes until the buffer is full."""
        place = 0
        while place < len(view):
            self._wait_no_longer()
            if not (count := self._connection.recv_into(view[place : place + PIECE_BYTES])):
                raise ValueError(f"it ended after {place} of {len(view)} bytes")
            place += count
