"""Rate limits: requests and bytes per second, and watches, that each member accepts from users, roles and prefixes;
and the weights with which members share their time among users, certificates and networks.

    limits.execute(limit)                 # sets it; a limit without numbers removes it
    limits.by_subject["user", b"alice"]

Limits are agreed through the log and stored next to the quotas of prefixes, so they survive a restart and come with a
received database. They have no effect on applying: members enforce them when a request arrives, each with its own clock
(``replica/node/throttle``, ``loop/fair``). The user or role need not exist: its limit stays when it is deleted, and
applies again when it is created again.

    raftkv_limit/<kind>/<name>  ->  requests_per_s, requests_burst, bytes_per_s, bytes_burst, watches_max, weight (u64)
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

from raftkv import errors
from raftkv.apply.alarms import MetaStore
from raftkv.pb import admin_pb2
from raftkv.storage import schema

LIMITS_MAX: Final = 1_000
NAME_BYTES_MAX: Final = 256

EACH: Final = "each"
"""Every identity without a limit of its own, each counted separately."""
PREFIX: Final = "prefix"
ROLE: Final = "role"
KINDS: Final = frozenset(("user", "certificate", "address", ROLE, PREFIX, EACH))

WEIGHT_MAX: Final = 10_000
WEIGHT_OF_OTHERS: Final = 100
"""The weight of identities that have none set, as ``cpu.weight`` of a control group in Linux."""
WEIGHTED: Final = frozenset(("user", "certificate", "address"))

_RECORD: Final = struct.Struct(">QQQQQQ")
_NO_WEIGHT: Final = bytes(8)
_OLD_SIZE_BYTES: Final = _RECORD.size - len(_NO_WEIGHT)
"""Size of records from before there were weights."""

Subject = tuple[str, bytes]
"""Kind and name."""


class Limits:
    """The limits of a cluster.

    Arguments:
        store: store of the limits.

    Attributes:
        by_subject: all limits, as they were set.
        on_change: called when a limit was set or removed, also by ``reload``.
    """

    def __init__(self, store: MetaStore) -> None:
        self._store = store
        self.by_subject: dict[Subject, admin_pb2.Limit] = {}
        self.on_change: list[Callable[[], None]] = []
        self.reload()

    def reload(self) -> None:
        """Read the limits from the store: at start, and after a snapshot replaced it."""
        self.by_subject = {}
        with schema.reading(schema.CLUSTER):
            for key, value in self._store.meta_items(schema.CLUSTER):
                if key.startswith(schema.CLUSTER_LIMIT_PREFIX):
                    kind, _, name = key.removeprefix(schema.CLUSTER_LIMIT_PREFIX).partition(b"/")
                    numbers = _RECORD.unpack(value + _NO_WEIGHT if len(value) == _OLD_SIZE_BYTES else value)
                    self.by_subject[kind.decode(), name] = _limit(kind.decode(), name, numbers)
        self._tell()

    def _tell(self) -> None:
        for callback in self.on_change:
            callback()

    def messages(self) -> list[admin_pb2.Limit]:
        """Return all limits, in order of kind and name."""
        return [limit for _, limit in sorted(self.by_subject.items())]

    def execute(self, limit: admin_pb2.Limit) -> None:
        """Set the limit of a subject, replacing the current one; a limit without numbers removes it.

        Raises:
            InvalidLimitError: the subject is invalid, or a number is negative or has no rate.
            LimitNotFoundError: there is no limit to remove.
            TooManyLimitsError: there are ``LIMITS_MAX`` limits.
        """
        check(limit)
        subject = limit.kind, limit.name
        key = schema.CLUSTER_LIMIT_PREFIX + limit.kind.encode() + b"/" + limit.name
        numbers = _numbers(limit)
        if not any(numbers):
            if self.by_subject.pop(subject, None) is None:
                raise errors.LimitNotFoundError
            self._store.meta_delete(schema.CLUSTER, key)
        else:
            if subject not in self.by_subject and len(self.by_subject) >= LIMITS_MAX:
                raise errors.TooManyLimitsError
            self.by_subject[subject] = _limit(*subject, numbers)
            self._store.meta_put(schema.CLUSTER, key, _RECORD.pack(*numbers))
        self._tell()


def check(limit: admin_pb2.Limit) -> None:
    """Raise InvalidLimitError if a limit makes no sense."""
    if limit.kind not in KINDS or len(limit.name) > NAME_BYTES_MAX:
        raise errors.InvalidLimitError
    if bool(limit.name) == (limit.kind == EACH) and limit.kind != PREFIX:
        raise errors.InvalidLimitError
    if min(_numbers(limit)) < 0:
        raise errors.InvalidLimitError("raftkv: a limit is 0 (none) or more")
    if limit.weight > WEIGHT_MAX or (limit.weight and limit.kind not in WEIGHTED):
        raise errors.InvalidLimitError("raftkv: a weight is 1 to 10,000, of a user, certificate or address")
    if (limit.requests_burst and not limit.requests_per_s) or (limit.bytes_burst and not limit.bytes_per_s):
        raise errors.InvalidLimitError("raftkv: a burst needs a rate of at least one request or byte a second")
    if limit.watches_max and limit.kind == PREFIX:
        raise errors.InvalidLimitError("raftkv: watches are limited by user, certificate, address or role, not prefix")


def limits_requests(limit: admin_pb2.Limit) -> bool:
    """Return whether a limit has numbers other than a weight."""
    return bool(limit.requests_per_s or limit.bytes_per_s or limit.watches_max)


def _numbers(limit: admin_pb2.Limit) -> tuple[int, ...]:
    requests, sizes = (limit.requests_per_s, limit.requests_burst), (limit.bytes_per_s, limit.bytes_burst)
    return *requests, *sizes, limit.watches_max, limit.weight


def _limit(kind: str, name: bytes, numbers: tuple[int, ...]) -> admin_pb2.Limit:
    requests_per_s, requests_burst, bytes_per_s, bytes_burst, watches_max, weight = numbers
    return admin_pb2.Limit(
        kind=kind,
        name=name,
        requests_per_s=requests_per_s,
        requests_burst=requests_burst,
        bytes_per_s=bytes_per_s,
        bytes_burst=bytes_burst,
        watches_max=watches_max,
        weight=weight,
    )
