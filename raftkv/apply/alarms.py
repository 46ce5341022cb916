"""Alarms of the cluster: which member raised which alarm, agreed through the log and stored on disk.

NOSPACE refuses requests that can grow the store; CORRUPT refuses every request that changes it. An alarm kind that this
version does not know refuses nothing; a log of another version may contain it, so it is stored, listed and disarmed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Final, Protocol, cast

from raftkv import errors
from raftkv.apply import txn, wire
from raftkv.pb import rpc_pb2
from raftkv.storage import schema

_KEY: Final = struct.Struct(">Qi")
ALARMS_MAX: Final = 1_000
"""Maximum number of raised alarms: a client may name any member, even one that does not exist."""


OnChange = Callable[[int, int, bool], object]
"""Callback with member id, alarm kind, and whether that alarm is now raised."""


class MetaStore(Protocol):
    """Small records of the member, committed together with the applied index."""

    def meta_put(self, bucket: bytes, key: bytes, value: bytes) -> None:
        """Write a record.

        Arguments:
            bucket, key, value: as in ``Store.meta_put``.
        """

    def meta_delete(self, bucket: bytes, key: bytes) -> None:
        """Remove a record, if it exists.

        Arguments:
            bucket, key: as in ``Store.meta_put``.
        """

    def meta_items(self, bucket: bytes) -> Iterable[tuple[bytes, bytes]]:
        """Return all records of a bucket, by key."""


class Alarms:
    """The raised alarms.

    Arguments:
        store: store of the alarms.
        bucket: name of their bucket (``storage.schema``).
        on_change: called for each alarm that is raised or disarmed, also by ``reload``.

    Attributes:
        on_change: all callbacks for changes, in order.
        any, no_space, corrupt: whether any alarm, any NOSPACE, any CORRUPT is raised.
    """

    def __init__(self, store: MetaStore, bucket: bytes, on_change: OnChange | None = None) -> None:
        self._store = store
        self._bucket = bucket
        self.on_change: list[OnChange] = [] if on_change is None else [on_change]
        self._raised: set[tuple[int, int]] = set()
        self._told: set[tuple[int, int]] = set()
        self.any = self.no_space = self.corrupt = False
        self.reload()

    def reload(self) -> None:
        """Read the alarms from the store: at start, and after a snapshot replaced it."""
        with schema.reading(self._bucket):
            self._raised = {_KEY.unpack(key) for key, _ in self._store.meta_items(self._bucket)}
        self._note()

    def _note(self) -> None:
        """Update the flags that every write checks, and report changes to the callbacks."""
        kinds = {kind for _, kind in self._raised}
        self.any = bool(kinds)
        self.no_space = rpc_pb2.NOSPACE in kinds
        self.corrupt = rpc_pb2.CORRUPT in kinds
        for member_id, kind in sorted(self._raised ^ self._told):
            for callback in self.on_change:
                callback(member_id, kind, (member_id, kind) in self._raised)
        self._told = set(self._raised)

    def execute(self, request: rpc_pb2.AlarmRequest) -> list[rpc_pb2.AlarmMember]:
        """Execute GET, ACTIVATE or DEACTIVATE; return the alarms for the response.

        Raises:
            TooManyRequestsError: ``ALARMS_MAX`` alarms are raised.
        """
        if request.action == rpc_pb2.AlarmRequest.GET:
            return self.raised(request.alarm)
        if request.action == rpc_pb2.AlarmRequest.ACTIVATE:
            return self._activate(request.memberID, request.alarm)
        if request.action == rpc_pb2.AlarmRequest.DEACTIVATE:
            return self._deactivate(request.memberID, request.alarm)
        return []

    def raised(self, alarm: int = rpc_pb2.NONE) -> list[rpc_pb2.AlarmMember]:
        """Return the raised alarms of a kind, NONE for all, by member id."""
        return [
            _alarm_member(member_id, kind) for member_id, kind in sorted(self._raised) if alarm in (rpc_pb2.NONE, kind)
        ]

    def is_raised(self, member_id: int, alarm: int) -> bool:
        """Return whether a member has raised an alarm of a kind."""
        return (member_id, alarm) in self._raised

    def check(self, kind: int, request: object) -> None:
        """Refuse a request that cannot be applied while an alarm is raised.

        Arguments:
            kind: kind of the request.
            request: the parsed message.

        Raises:
            CorruptClusterError, NoSpaceError: the alarm that forbids the request.
        """
        if self.corrupt and kind in _REFUSED_WHEN_CORRUPT:
            raise errors.CorruptClusterError
        if self.no_space and can_grow(kind, request):
            raise errors.NoSpaceError

    def _activate(self, member_id: int, alarm: int) -> list[rpc_pb2.AlarmMember]:
        if alarm == rpc_pb2.NONE:
            return []
        if len(self._raised) >= ALARMS_MAX and (member_id, alarm) not in self._raised:
            raise errors.TooManyRequestsError
        self._raised.add((member_id, alarm))
        self._note()
        self._store.meta_put(self._bucket, _KEY.pack(member_id, alarm), b"")
        return [_alarm_member(member_id, alarm)]

    def _deactivate(self, member_id: int, alarm: int) -> list[rpc_pb2.AlarmMember]:
        if (member_id, alarm) not in self._raised:
            return []
        self._raised.remove((member_id, alarm))
        self._note()
        self._store.meta_delete(self._bucket, _KEY.pack(member_id, alarm))
        return [_alarm_member(member_id, alarm)]


def _alarm_member(member_id: int, alarm: int) -> rpc_pb2.AlarmMember:
    # An open enum: the message accepts any number, including a kind that this version does not know.
    return rpc_pb2.AlarmMember(memberID=member_id, alarm=cast("rpc_pb2.AlarmType", alarm))


_REFUSED_WHEN_CORRUPT: Final = frozenset(
    (
        wire.Kind.PUT,
        wire.Kind.DELETE_RANGE,
        wire.Kind.TXN,
        wire.Kind.COMPACT,
        wire.Kind.LEASE_GRANT,
        wire.Kind.LEASE_REVOKE,
        wire.Kind.LEASE_EXPIRE,
    )
)
_ALWAYS_GROW: Final = frozenset((wire.Kind.PUT, wire.Kind.LEASE_GRANT))


def can_grow(kind: int, request: object) -> bool:
    """Return whether applying a request may enlarge the store.

    Arguments:
        kind: kind of the request.
        request: the parsed message, or its plain form.
    """
    if isinstance(request, wire.PlainTxn):
        return request.writes
    return kind in _ALWAYS_GROW or (isinstance(request, rpc_pb2.TxnRequest) and txn.has_put(request))
