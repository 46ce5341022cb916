"""The state shared by the parts of a client: connection, key space, default timeout, watches, keep-alives.

A view of a client has the same state with another key space.

    async with open_scope(core, timeout_s=5.0) as scope:       # from ``library``
        lease = await Lease(scope, 10)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from raftkv.client.arguments import seconds
from raftkv.client.rpc.core import Client as Core
from raftkv.client.rpc.methods import Method, staleness_metadata
from raftkv.client.values import DELETE, PUT, Event, KeyValue
from raftkv.errors import EmptyKeyError

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from raftkv.client.lease import LeaseKeeper
    from raftkv.client.operations import FenceLike
    from raftkv.client.watch import WatchHub
    from raftkv.pb import kv_pb2

# -- keys -----------------------------------------------------------------------------------------------------------
#
# Keys as text or bytes, etcd's encoding of ranges, and key spaces with a prefix.


def prefix_end(prefix: bytes) -> bytes:
    r"""Return the range end that makes ``[prefix, end)`` all keys beginning with a prefix.

    >>> prefix_end(b"a"), prefix_end(b"a\xff"), prefix_end(b"\xff")
    (b'b', b'b', b'\x00')
    """
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else b"\0"


Text = str | bytes
"""A key or a value as the user writes it; text is encoded as UTF-8."""

FROM_KEY = b"\0"
"""The range end that means no end."""


def to_bytes(text: str | bytes | bytearray | memoryview) -> bytes:
    """Return the bytes of a key or value.

    Raises:
        TypeError: the value is neither text nor bytes; numbers are not converted.
    """
    if isinstance(text, bytes):
        return text
    if isinstance(text, str):
        return text.encode()
    if isinstance(text, bytearray | memoryview):
        return bytes(text)
    raise TypeError(f"keys and values are str or bytes, not {type(text).__name__}")


class Space:
    r"""All keys with a prefix, which is added to keys in requests and removed from keys in responses.

    >>> jobs = Space(b"jobs/")
    >>> jobs.key("a")
    b'jobs/a'
    >>> jobs.interval("", None, prefix=True), Space().interval("", None, prefix=True)
    ((b'jobs/', b'jobs0'), (b'\x00', b'\x00'))

    Ranges are etcd's: without an end, one key; with the end ``b"\0"``, all keys from the first on, in a view up to its
    end.

    Attributes:
        prefix: prefix of every key; empty: all keys.
    """

    __slots__ = ("_length", "prefix")

    def __init__(self, prefix: bytes = b"") -> None:
        self.prefix = prefix
        self._length = len(prefix)

    def inside(self, prefix: Text) -> Space:
        """Return the space of a prefix within this one."""
        return Space(self.prefix + to_bytes(prefix))

    def key(self, key: Text) -> bytes:
        """Return the key as the store knows it.

        Raises:
            EmptyKeyError: the key is empty.
            TypeError: the key is neither text nor bytes.
        """
        name = key if isinstance(key, bytes) else to_bytes(key)
        if not name:
            raise EmptyKeyError
        return self.prefix + name

    def interval(self, key: Text, end: Text | None, *, prefix: bool) -> tuple[bytes, bytes]:
        """Return the first key and the range end, as the store knows them.

        Arguments:
            key: first key, or the prefix.
            end: end of the range, exclusive; None or empty: ``key`` alone.
            prefix: whether to cover all keys that begin with ``key``; excludes ``end``.

        Raises:
            ValueError: both an end and a prefix.
            EmptyKeyError: the key is empty and not a prefix.
        """
        if prefix:
            if end is not None:
                raise ValueError("give an end or prefix=True, not both")
            first = self.prefix + to_bytes(key)
            return first or FROM_KEY, prefix_end(first)
        last = b"" if end is None else to_bytes(end)
        if not last:
            return self.key(key), b""
        if last == FROM_KEY:
            return self.prefix + to_bytes(key) or FROM_KEY, prefix_end(self.prefix)
        return self.key(key), self.prefix + last

    def key_value(self, kv: kv_pb2.KeyValue) -> KeyValue:
        """Convert a key of the store to the client's view."""
        key = kv.key[self._length :] if self._length else kv.key
        return KeyValue(key, kv.value, kv.version, kv.create_revision, kv.mod_revision, kv.lease)

    def key_values(self, kvs: Iterable[kv_pb2.KeyValue]) -> tuple[KeyValue, ...]:
        """Convert keys of the store to the client's view."""
        convert = self.key_value
        return tuple([convert(kv) for kv in kvs])

    def event(self, event: kv_pb2.Event) -> Event:
        """Convert a change to the client's view."""
        previous = self.key_value(event.prev_kv) if event.HasField("prev_kv") else None
        return Event(DELETE if event.type else PUT, self.key_value(event.kv), previous)


T = TypeVar("T", bound="Message")


@dataclass(slots=True)
class Scope:
    """The state shared by the parts of a client.

    Attributes:
        core: calls with failover.
        space: key space of this client.
        timeout_s: default time limit of a call.
        hub: watches of the connection.
        keeper: lease keep-alives of the connection.
        fence: fence of all txns that have no other fence; None: none.
    """

    core: Core
    space: Space
    timeout_s: float
    hub: WatchHub
    keeper: LeaseKeeper
    fence: FenceLike | None = None

    def inside(self, prefix: Text) -> Scope:
        """Return the scope of the keys with a prefix."""
        return dataclasses.replace(self, space=self.space.inside(prefix))

    def fenced(self, fence: FenceLike) -> Scope:
        """Return the same scope with a default fence for all its txns."""
        return dataclasses.replace(self, fence=fence)

    def call(
        self, method: Method[T], request: Any, timeout_s: float | None = None, max_staleness_s: float | None = None
    ) -> Coroutine[Any, Any, T]:
        """Call a method at any endpoint.

        Arguments:
            method: method to call.
            request: request message, with keys as the store knows them.
            timeout_s: limit for all attempts together; None: the scope's.
            max_staleness_s: maximum age of the state that a read returns; None: the request decides.

        Raises:
            StatusError: the cluster refused, or could not be reached in time.
            TypeError: a time is not a number.
            ValueError: a time is not finite, or the staleness is negative.
        """
        timeout_s = self.timeout_s if timeout_s is None else seconds(timeout_s, "timeout_s")
        if max_staleness_s is None:
            return self.core.call(method, request, timeout_s=timeout_s)
        return self.core.call(method, request, timeout_s=timeout_s, metadata=staleness_metadata(max_staleness_s))


class Part:
    """Methods of a client about one subject.

    Attributes:
        scope: state shared with the other parts.
    """

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
