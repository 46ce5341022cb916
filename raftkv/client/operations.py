"""Operations: the requests of ``put``, ``get``, ``get_range`` and ``delete``, alone or inside a txn.

::

    await kv.txn().when(kv.version("a") == 0).then(put("a", b"1"), get_range("b/", prefix=True)).commit()

An operation is a value. It is translated to a request when it is sent, in the key space of its sender.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, Protocol, runtime_checkable

from raftkv.client.errors import LeaseLost
from raftkv.client.scope import Space, Text, to_bytes
from raftkv.client.values import DeleteResult, KeyValue, PutResult, RangeResult
from raftkv.pb import rpc_pb2

# -- compares -------------------------------------------------------------------------------------------------------
#
# Conditions of a txn, written as comparisons.
#
# ::
#
#     version("a") == 0                    # the key does not exist
#     value("a") != b"x"                   # it exists and has another value
#     mod_revision("a") < 100
#     create_revision("jobs/", prefix=True) > 7      # all keys of the range
#     lease_of("a") == lease.id
#
# A key that does not exist has version, revisions and lease 0; a condition on its *value* never holds, not even
# ``!=``.

Target = Literal["version", "create_revision", "mod_revision", "value", "lease"]

_TARGETS: Final = {
    "version": rpc_pb2.Compare.VERSION,
    "create_revision": rpc_pb2.Compare.CREATE,
    "mod_revision": rpc_pb2.Compare.MOD,
    "value": rpc_pb2.Compare.VALUE,
    "lease": rpc_pb2.Compare.LEASE,
}
_RELATIONS: Final = {
    "==": rpc_pb2.Compare.EQUAL,
    "!=": rpc_pb2.Compare.NOT_EQUAL,
    ">": rpc_pb2.Compare.GREATER,
    "<": rpc_pb2.Compare.LESS,
}


@dataclass(frozen=True, slots=True)
class Compare:
    """A condition: a property of a key (or of all keys of a range), a relation, a constant."""

    target: Target
    key: Text
    end: Text | None
    prefix: bool
    relation: str
    constant: Text | int

    def to_message(self, space: Space) -> rpc_pb2.Compare:
        """Return the request message."""
        key, end = space.interval(self.key, self.end, prefix=self.prefix)
        message = rpc_pb2.Compare(
            result=_RELATIONS[self.relation], target=_TARGETS[self.target], key=key, range_end=end
        )
        # Set explicitly, also if zero, because the field selects the member of the union.
        constant = self.constant if isinstance(self.constant, int) else to_bytes(self.constant)
        setattr(message, self.target, constant)
        return message

    def __bool__(self) -> bool:
        # ``when(version("a") == 0 and ...)`` would silently drop the first condition.
        raise TypeError("a condition is known only to the cluster: pass several to when(), without and/or/not")


class Property:
    """A property of a key, for comparisons.

    Arguments:
        target: property to compare.
        key, end, prefix: key or range; see ``Space.interval``.
    """

    __slots__ = ("_end", "_key", "_prefix", "_target")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, target: Target, key: Text, end: Text | None = None, prefix: bool = False) -> None:
        self._target: Target = target
        self._key = key
        self._end = end
        self._prefix = prefix

    def __eq__(self, constant: object) -> Compare:  # type: ignore[override]
        return self._compare("==", constant)

    def __ne__(self, constant: object) -> Compare:  # type: ignore[override]
        return self._compare("!=", constant)

    def __gt__(self, constant: Text | int) -> Compare:
        return self._compare(">", constant)

    def __lt__(self, constant: Text | int) -> Compare:
        return self._compare("<", constant)

    def _compare(self, relation: str, constant: object) -> Compare:
        wanted = (str, bytes) if self._target == "value" else (int,)
        if not isinstance(constant, wanted):
            names = " or ".join(kind.__name__ for kind in wanted)
            raise TypeError(f"{self._target} is compared with {names}, not {type(constant).__name__}")
        return Compare(self._target, self._key, self._end, self._prefix, relation, constant)


def version(key: Text, end: Text | None = None, *, prefix: bool = False) -> Property:
    """Compare the number of writes since the key was created; 0: the key does not exist.

    Arguments:
        key: key, or first key of a range.
        end, prefix: as for ``range``: the condition must hold for all keys in the range.
    """
    return Property("version", key, end, prefix)


def value(key: Text, end: Text | None = None, *, prefix: bool = False) -> Property:
    """Compare the value; for a key that does not exist, no comparison holds.

    Arguments:
        key: key, or first key of a range.
        end, prefix: as for ``range``: the condition must hold for all keys in the range.
    """
    return Property("value", key, end, prefix)


def create_revision(key: Text, end: Text | None = None, *, prefix: bool = False) -> Property:
    """Compare the revision of the write that created the key; 0: the key does not exist.

    Arguments:
        key: key, or first key of a range.
        end, prefix: as for ``range``: the condition must hold for all keys in the range.
    """
    return Property("create_revision", key, end, prefix)


def mod_revision(key: Text, end: Text | None = None, *, prefix: bool = False) -> Property:
    """Compare the revision of the last write; 0: the key does not exist.

    Arguments:
        key: key, or first key of a range.
        end, prefix: as for ``range``: the condition must hold for all keys in the range.
    """
    return Property("mod_revision", key, end, prefix)


def lease_of(key: Text, end: Text | None = None, *, prefix: bool = False) -> Property:
    """Compare the id of the lease that the key is attached to; 0: none.

    Arguments:
        key: key, or first key of a range.
        end, prefix: as for ``range``: the condition must hold for all keys in the range.
    """
    return Property("lease", key, end, prefix)


# -- guards ---------------------------------------------------------------------------------------------------------
#
# Guards of a write: the lease that the key is attached to, or a lock or term that must still be held.
#
# Each is checked twice: here, before the call, against this client's clock; and by the cluster, within the write. So a
# process that was stopped for longer than its lease writes nothing.


class LeaseGuard(Protocol):
    """A lease that can check whether it is safe to use."""

    @property
    def id(self) -> int:
        """The lease id."""

    def check(self) -> None:
        """Raise ``LeaseLost`` if the lease is not safe to use."""

    def lose(self, reason: str) -> None:
        """Record that the cluster does not know the lease any more."""


class Fence(Protocol):
    """A lock or a term: a key whose create revision is the holder's fencing token."""

    @property
    def guard_key(self) -> bytes:
        """The key, as the store knows it."""

    @property
    def fence(self) -> int:
        """The create revision of the key."""

    def check(self) -> None:
        """Raise ``LeaseLost`` or ``FenceLost`` if the lock or term is not safe to use."""

    def broken(self) -> Exception:
        """Return the error for a write that the cluster refused because the key was deleted or replaced."""


@runtime_checkable
class Conditions(Protocol):
    """A guard given as conditions on the store, for example a generation of a training run."""

    def compares(self) -> list[rpc_pb2.Compare]:
        """Return conditions that must all hold, with keys as the store knows them."""

    def broken(self) -> Exception:
        """Return the error for a write that the cluster refused because a condition does not hold."""


FenceLike = Fence | Conditions
"""The type of ``fence=``."""

LeaseLike = int | LeaseGuard
"""A lease id, or a lease of this library, which is checked before use."""


def lease_id(lease: LeaseLike | None) -> int:
    """Return the id of a lease after checking it; 0 for None.

    Raises:
        LeaseLost: the lease is not safe to use.
        TypeError: the value is neither an id nor a lease.
    """
    if lease is None:
        return 0
    if isinstance(lease, int):
        return lease
    if not hasattr(lease, "check"):
        raise TypeError(f"lease= takes a lease of this client, or its id, not {lease!r}")
    lease.check()
    return lease.id


def lost_lease(leases: Iterable[LeaseLike | None]) -> LeaseLost | None:
    """Return the error after the cluster did not find a lease; None if all were given as ids, so any may be missing."""
    guards = [lease for lease in leases if lease is not None and not isinstance(lease, int)]
    if len(guards) != 1:
        return None
    reason = "the cluster no longer knows it"
    guards[0].lose(reason)
    return LeaseLost(guards[0].id, reason)


def fence_compares(fence: FenceLike) -> list[rpc_pb2.Compare]:
    """Return conditions that hold only while the lock or term is held, or the generation lasts.

    Raises:
        LeaseLost: this client knows already that the lock or term is lost.
        TypeError: the value is not a fence.
    """
    if isinstance(fence, Conditions):
        return fence.compares()
    if not hasattr(fence, "guard_key"):
        raise TypeError(f"fence= takes a lock, a term or the fence of a run, not {fence!r}")
    fence.check()
    held = rpc_pb2.Compare(result=rpc_pb2.Compare.EQUAL, target=rpc_pb2.Compare.CREATE, key=fence.guard_key)
    held.create_revision = fence.fence
    return [held]


SortBy = Literal["key", "version", "create_revision", "mod_revision", "value"]

_SORT_TARGETS: Final = {
    "key": rpc_pb2.RangeRequest.KEY,
    "version": rpc_pb2.RangeRequest.VERSION,
    "create_revision": rpc_pb2.RangeRequest.CREATE,
    "mod_revision": rpc_pb2.RangeRequest.MOD,
    "value": rpc_pb2.RangeRequest.VALUE,
}


class Operation:
    """An operation of a txn: its request, and the conversion of its response.

    Attributes:
        FIELD: name of the request and response fields in the messages of a txn.
    """

    __slots__ = ()
    FIELD: ClassVar[str]

    @property
    def writes(self) -> bool:
        """Whether the operation may change the store."""
        return False

    def leases(self) -> tuple[LeaseLike | None, ...]:
        """Return the leases that the operation uses."""
        return ()

    def request(self, space: Space) -> Any:
        """Return the request message, with keys as the store knows them."""
        raise NotImplementedError

    def result(self, answer: Any, space: Space, revision: int) -> Any:
        """Convert the answer to the operation's result.

        Arguments:
            answer: answer of the member.
            space: key space of the client.
            revision: revision of the store, for answers that do not contain it.
        """
        raise NotImplementedError

    def to_message(self, space: Space) -> rpc_pb2.RequestOp:
        """Return the operation's message in a txn."""
        return rpc_pb2.RequestOp(**{f"request_{self.FIELD}": self.request(space)})

    def from_message(self, response: rpc_pb2.ResponseOp, space: Space, revision: int) -> Any:
        """Return the operation's result from the response of a txn.

        Arguments:
            response: response of the member.
            space: key space of the client.
            revision: revision of the store after the txn.
        """
        return self.result(getattr(response, f"response_{self.FIELD}"), space, revision)


@dataclass(frozen=True, slots=True)
class Put(Operation):
    """A put, created by ``put``."""

    FIELD: ClassVar[str] = "put"

    key: Text
    value: Text = b""
    lease: LeaseLike | None = None
    prev_kv: bool = False
    ignore_value: bool = False
    ignore_lease: bool = False

    @property
    def writes(self) -> bool:
        """Return True."""
        return True

    def leases(self) -> tuple[LeaseLike | None, ...]:
        """Return the lease that the key is attached to."""
        return (self.lease,)

    def request(self, space: Space) -> rpc_pb2.PutRequest:
        """Implement ``Operation.request``."""
        return rpc_pb2.PutRequest(
            key=space.key(self.key),
            value=to_bytes(self.value),
            lease=lease_id(self.lease),
            prev_kv=self.prev_kv,
            ignore_value=self.ignore_value,
            ignore_lease=self.ignore_lease,
        )

    def result(self, answer: rpc_pb2.PutResponse, space: Space, revision: int = 0) -> PutResult:
        """Implement ``Operation.result``."""
        previous = space.key_value(answer.prev_kv) if answer.HasField("prev_kv") else None
        return PutResult(answer.header.revision, previous)


@dataclass(frozen=True, slots=True)
class GetRange(Operation):
    """A read of a range, created by ``get_range``."""

    FIELD: ClassVar[str] = "range"

    key: Text
    end: Text | None = None
    prefix: bool = False
    limit: int = 0
    revision: int = 0
    sort_by: SortBy = "key"
    descending: bool = False
    keys_only: bool = False
    count_only: bool = False
    serializable: bool = False
    min_mod_revision: int = 0
    max_mod_revision: int = 0
    min_create_revision: int = 0
    max_create_revision: int = 0

    def request(self, space: Space) -> rpc_pb2.RangeRequest:
        """Implement ``Operation.request``."""
        key, end = space.interval(self.key, self.end, prefix=self.prefix)
        request = rpc_pb2.RangeRequest(
            key=key,
            range_end=end,
            limit=self.limit,
            revision=self.revision,
            keys_only=self.keys_only,
            count_only=self.count_only,
            serializable=self.serializable,
            min_mod_revision=self.min_mod_revision,
            max_mod_revision=self.max_mod_revision,
            min_create_revision=self.min_create_revision,
            max_create_revision=self.max_create_revision,
        )
        if self.descending or self.sort_by != "key":
            # Always explicit: without an order, members apply the limit before they sort.
            order = rpc_pb2.RangeRequest.DESCEND if self.descending else rpc_pb2.RangeRequest.ASCEND
            if self.sort_by not in list(_SORT_TARGETS):
                raise ValueError(f"sort_by is one of {', '.join(_SORT_TARGETS)}, not {self.sort_by!r}")
            request.sort_order, request.sort_target = order, _SORT_TARGETS[self.sort_by]
        return request

    def result(self, answer: rpc_pb2.RangeResponse, space: Space, revision: int) -> RangeResult:
        """Implement ``Operation.result``."""
        return RangeResult(space.key_values(answer.kvs), answer.count, answer.more, revision)


@dataclass(frozen=True, slots=True)
class Get(Operation):
    """A read of one key, created by ``get``."""

    FIELD: ClassVar[str] = "range"

    key: Text
    revision: int = 0
    serializable: bool = False

    def request(self, space: Space) -> rpc_pb2.RangeRequest:
        """Implement ``Operation.request``."""
        return rpc_pb2.RangeRequest(key=space.key(self.key), revision=self.revision, serializable=self.serializable)

    def result(self, answer: rpc_pb2.RangeResponse, space: Space, revision: int) -> KeyValue | None:
        """Implement ``Operation.result``."""
        return space.key_value(answer.kvs[0]) if answer.kvs else None


@dataclass(frozen=True, slots=True)
class Delete(Operation):
    """A deletion, created by ``delete``."""

    FIELD: ClassVar[str] = "delete_range"

    key: Text
    end: Text | None = None
    prefix: bool = False
    prev_kv: bool = False

    @property
    def writes(self) -> bool:
        """Return True: the members have to agree even if there is no key to delete."""
        return True

    def request(self, space: Space) -> rpc_pb2.DeleteRangeRequest:
        """Implement ``Operation.request``."""
        key, end = space.interval(self.key, self.end, prefix=self.prefix)
        return rpc_pb2.DeleteRangeRequest(key=key, range_end=end, prev_kv=self.prev_kv)

    def result(self, answer: rpc_pb2.DeleteRangeResponse, space: Space, revision: int = 0) -> DeleteResult:
        """Implement ``Operation.result``."""
        return DeleteResult(answer.header.revision, answer.deleted, space.key_values(answer.prev_kvs))


put = Put
"""``put(key, value=b"", lease=None, prev_kv=False, ignore_value=False, ignore_lease=False)`` in a txn."""
get = Get
"""``get(key, revision=0, serializable=False)`` in a txn; its result is a ``KeyValue`` or None."""
get_range = GetRange
"""``get_range(key, end=None, prefix=False, limit=0, ...)`` in a txn; its result is a ``RangeResult``."""
delete = Delete
"""``delete(key, end=None, prefix=False, prev_kv=False)`` in a txn."""
