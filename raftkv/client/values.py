"""Results of the library: keys and values, events, members. Immutable, and independent of protobuf messages.

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
    """A key at some revision.

    Attributes:
        key: key without the prefix of the view it was read through.
        value: value; empty if only keys were requested.
        version: number of writes since the key was created, from 1.
        create_revision: revision of the write that created the key.
        mod_revision: revision of the last write.
        lease: id of the lease that the key is attached to; 0: none.
    """

    key: bytes
    value: bytes
    version: int
    create_revision: int
    mod_revision: int
    lease: int

    @property
    def text(self) -> str:
        """The value, decoded as UTF-8."""
        return self.value.decode()


@dataclass(frozen=True, slots=True)
class PutResult:
    """The result of a put: the revision of the store, and the previous key if requested."""

    revision: int
    prev_kv: KeyValue | None = None


@dataclass(frozen=True, slots=True)
class DeleteResult:
    """The result of a delete: revision, number of deleted keys, and these keys if requested."""

    revision: int
    deleted: int
    prev_kvs: tuple[KeyValue, ...] = ()


@dataclass(frozen=True, slots=True)
class RangeResult:
    """The keys of a range; a sequence of ``KeyValue``.

    Attributes:
        items: keys that were read, in order.
        count: number of keys in the whole range, regardless of the limit.
        more: whether the limit left some keys out.
        revision: revision of the store at the read, to continue reading or watching from.
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
    """The result of a txn; unpacks to ``succeeded, results``.

    Attributes:
        succeeded: whether the conditions held, so that ``then`` was executed.
        results: one for each operation: ``PutResult``; ``DeleteResult``; for ``get`` a ``KeyValue`` or None; for
            ``range`` a ``RangeResult``; for a txn inside, a ``TxnResult``.
        revision: revision of the store after the txn.
        cluster_id: id of the cluster that executed the txn; 0: unknown.
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
        prev_kv: the key before the change, if the watch requested it, and the key existed and is not compacted.
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
        """Whether the change created the key."""
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
    """The status of a member, or why it is unknown.

    Attributes:
        endpoint: endpoint as given to the client.
        error: empty, or why there is no answer; all other values are then zero.
        version: version of the server.
        member_id: id of the member.
        leader_id: id of the leader that it follows; 0: none.
        revision: revision of its store.
        db_size_bytes: size of its database file.
        raft_term: its term.
        raft_index: last index of its log.
        raft_applied_index: last index that it has applied.
        is_learner: whether it is a learner.
        errors: problems that it reports, e.g. alarms.
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
        """Whether the member answered and has a leader."""
        return not self.error and self.leader_id != 0

    @property
    def is_leader(self) -> bool:
        """Whether the member is the leader."""
        return self.leader_id != 0 and self.leader_id == self.member_id


@dataclass(frozen=True, slots=True)
class Alarm:
    """An active alarm: the member, and ``"NOSPACE"`` or ``"CORRUPT"``."""

    member_id: int
    kind: str


@dataclass(frozen=True, slots=True)
class PrefixQuota:
    """The limits of a prefix (0: none), and its usage: existing keys, and bytes in the database.

    ``bytes_history`` is the part of the bytes in old revisions, which a compaction frees. While ``is_counting`` is set,
    the usage does not yet include all data older than the quota.
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
    """The limit at each member for a user, certificate, address, role, prefix, or each identity; 0: no limit.

    ``weight`` (1 to 10,000; 0: 100, as others have) is not a limit: the part of the members' time while others wait.
    """

    kind: str
    name: bytes = b""
    requests_per_s: int = 0
    requests_burst: int = 0
    bytes_per_s: int = 0
    bytes_burst: int = 0
    watches_max: int = 0
    weight: int = 0


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """The cluster's information about a lease: seconds left (-1: no such lease), granted seconds, its keys."""

    id: int
    ttl: int
    granted_ttl: int
    keys: tuple[bytes, ...] = ()
