"""Results of the library: keys and values, events, members. Immutable, and free of messages.

>>> item = KeyValue(b"jobs/a", b"1", version=1, create_revision=7, mod_revision=7, lease=0)
>>> item.key, item.value.decode(), item.text
(b'jobs/a', '1', '1')
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal

PUT: Final = "PUT"
DELETE: Final = "DELETE"


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key as it is, or was at some revision.

    Attributes:
        key: without the prefix of the view it was read through.
        value: empty if only keys were asked for.
        version: writes since it was created, from 1.
        create_revision: of the write that created it.
        mod_revision: of the last write.
        lease: id of the lease it ends with; 0: none.
    """

    key: bytes
    value: bytes
    version: int
    create_revision: int
    mod_revision: int
    lease: int

    @property
    def text(self) -> str:
        """The value, read as UTF-8."""
        return self.value.decode()


@dataclass(frozen=True, slots=True)
class PutResult:
    """A put that is done: the store's revision with it, and the key before it if that was asked for."""

    revision: int
    prev_kv: KeyValue | None = None


@dataclass(frozen=True, slots=True)
class DeleteResult:
    """A delete that is done: revision, number of keys, and the keys if they were asked for."""

    revision: int
    deleted: int
    prev_kvs: tuple[KeyValue, ...] = ()


@dataclass(frozen=True, slots=True)
class RangeResult:
    """Keys of an interval; a sequence of ``KeyValue``.

    Attributes:
        items: the keys that were asked for, in order.
        count: keys in the whole interval, regardless of the limit.
        more: the limit left some out.
        revision: of the store when it was read, to read or to watch on from there.
    """

    items: tuple[KeyValue, ...]
    count: int
    more: bool
    revision: int

    def __iter__(self) -> Iterator[KeyValue]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> KeyValue:
        return self.items[index]


@dataclass(frozen=True, slots=True)
class TxnResult:
    """A txn that is done; unpacks to ``succeeded, results``.

    Attributes:
        succeeded: whether the conditions held, so whether ``then`` was executed.
        results: one for each operation: ``PutResult``; ``DeleteResult``; for ``get`` a ``KeyValue`` or None; for
            ``range`` a ``RangeResult``; for a txn inside, a ``TxnResult``.
        revision: of the store after it.
        cluster_id: of the cluster that executed it; 0: it has not said.
    """

    succeeded: bool
    results: tuple[Any, ...]
    revision: int
    cluster_id: int = field(default=0, compare=False)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.succeeded, self.results))


@dataclass(frozen=True, slots=True)
class Event:
    """A change of a key.

    Attributes:
        type: ``"PUT"`` or ``"DELETE"``.
        kv: the key after the change; after a delete it has only key and mod_revision.
        prev_kv: the key before it, if the watch asked for that, it existed and is not compacted.
    """

    type: Literal["PUT", "DELETE"]
    kv: KeyValue
    prev_kv: KeyValue | None = None

    @property
    def key(self) -> bytes:
        """The key."""
        return self.kv.key

    @property
    def value(self) -> bytes:
        """The value; empty after a delete."""
        return self.kv.value

    @property
    def revision(self) -> int:
        """The revision of the change."""
        return self.kv.mod_revision

    @property
    def is_create(self) -> bool:
        """Whether the key did not exist before."""
        return self.type == PUT and self.kv.create_revision == self.kv.mod_revision


@dataclass(frozen=True, slots=True)
class Member:
    """A member of the cluster."""

    id: int
    name: str
    peer_urls: tuple[str, ...]
    client_urls: tuple[str, ...]
    is_learner: bool


@dataclass(frozen=True, slots=True)
class EndpointStatus:
    """The status of a member, or why it gave none.

    Attributes:
        endpoint: as the client was given it.
        error: empty, or why there is no answer; then the rest is zero.
        version: of the server.
        member_id: of the member.
        leader_id: of the leader it follows; 0: none.
        revision: of its store.
        db_size_bytes: of its database file.
        raft_term: its term.
        raft_index: last index of its log.
        raft_applied_index: last index that it has applied.
        is_learner: it does not vote.
        errors: what it complains of, e.g. alarms.
    """

    endpoint: str
    error: str = ""
    version: str = ""
    member_id: int = 0
    leader_id: int = 0
    revision: int = 0
    db_size_bytes: int = 0
    raft_term: int = 0
    raft_index: int = 0
    raft_applied_index: int = 0
    is_learner: bool = False
    errors: tuple[str, ...] = ()

    @property
    def healthy(self) -> bool:
        """It answered, and it has a leader."""
        return not self.error and self.leader_id != 0

    @property
    def is_leader(self) -> bool:
        """It leads."""
        return self.leader_id != 0 and self.leader_id == self.member_id


@dataclass(frozen=True, slots=True)
class Alarm:
    """An alarm that is on: of which member, and ``"NOSPACE"`` or ``"CORRUPT"``."""

    member_id: int
    kind: str


@dataclass(frozen=True, slots=True)
class PrefixQuota:
    """Limits of a prefix (0: none), and what is used: keys that exist, and bytes that the database keeps.

    ``bytes_history`` of these bytes are of old revisions, until a compaction gives them back; -1: they are not counted,
    because an earlier build set the quota. While ``is_counting``, what was there before the quota is in part missing.
    """

    prefix: bytes
    bytes_max: int
    keys_max: int
    bytes_used: int
    keys_used: int
    bytes_history: int = 0
    is_counting: bool = False


@dataclass(frozen=True, slots=True)
class RateLimit:
    """What each member takes of a user, certificate, address, role, prefix, or of each identity apart; 0: no limit."""

    kind: str
    name: bytes = b""
    requests_per_s: int = 0
    requests_burst: int = 0
    bytes_per_s: int = 0
    bytes_burst: int = 0
    watches_max: int = 0


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """A lease as the cluster knows it: seconds that are left (-1: no such lease), seconds granted, its keys."""

    id: int
    ttl: int
    granted_ttl: int
    keys: tuple[bytes, ...] = ()
