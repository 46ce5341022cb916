"""Operations: what ``put``, ``get``, ``get_range`` and ``delete`` ask for, alone or inside a txn.

::

    await kv.txn().when(kv.version("a") == 0).then(put("a", b"1"), get_range("b/", prefix=True)).commit()

An operation is a value; it is translated to a request only when it is sent, in the key space of whoever sends it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from raftkv.client.keys import Space, Text, to_bytes
from raftkv.client.kv.compares import LeaseLike, lease_id
from raftkv.client.values import DeleteResult, KeyValue, PutResult, RangeResult
from raftkv.pb import rpc_pb2

SortBy = Literal["key", "version", "create_revision", "mod_revision", "value"]

_SORT_TARGETS: Final = {
    "key": rpc_pb2.RangeRequest.KEY,
    "version": rpc_pb2.RangeRequest.VERSION,
    "create_revision": rpc_pb2.RangeRequest.CREATE,
    "mod_revision": rpc_pb2.RangeRequest.MOD,
    "value": rpc_pb2.RangeRequest.VALUE,
}


def _sort_target(sort_by: str) -> rpc_pb2.RangeRequest.SortTarget:
    try:
        return _SORT_TARGETS[sort_by]
    except (KeyError, TypeError):
        raise ValueError(f"sort_by is one of {', '.join(_SORT_TARGETS)}, not {sort_by!r}") from None


class Operation(Protocol):
    """What a txn can hold."""

    @property
    def writes(self) -> bool:
        """Whether it may change the store."""
        ...

    def leases(self) -> tuple[LeaseLike | None, ...]:
        """Leases that it relies on."""
        ...

    def to_message(self, space: Space) -> rpc_pb2.RequestOp:
        """Return its message in a txn."""
        ...

    def from_message(self, response: rpc_pb2.ResponseOp, space: Space, revision: int) -> Any:
        """Return its result from the response of a txn.

        Arguments:
            response: of the member.
            space: keys as the client sees them.
            revision: of the store after the txn.
        """
        ...


@dataclass(frozen=True, slots=True)
class Put:
    """A put, made by ``put``."""

    key: Text
    value: Text = b""
    lease: LeaseLike | None = None
    prev_kv: bool = False
    ignore_value: bool = False
    ignore_lease: bool = False

    @property
    def writes(self) -> bool:
        """Always."""
        return True

    def leases(self) -> tuple[LeaseLike | None, ...]:
        """Return the lease that it attaches the key to."""
        return (self.lease,)

    def request(self, space: Space) -> rpc_pb2.PutRequest:
        """Return the request message."""
        return rpc_pb2.PutRequest(
            key=space.key(self.key),
            value=to_bytes(self.value),
            lease=lease_id(self.lease),
            prev_kv=self.prev_kv,
            ignore_value=self.ignore_value,
            ignore_lease=self.ignore_lease,
        )

    def result(self, answer: rpc_pb2.PutResponse, space: Space) -> PutResult:
        """Return the result of the answer.

        Arguments:
            answer: of the member.
            space: keys as the client sees them.
        """
        previous = space.key_value(answer.prev_kv) if answer.HasField("prev_kv") else None
        return PutResult(answer.header.revision, previous)

    def to_message(self, space: Space) -> rpc_pb2.RequestOp:
        """Return its message in a txn."""
        return rpc_pb2.RequestOp(request_put=self.request(space))

    def from_message(self, response: rpc_pb2.ResponseOp, space: Space, revision: int) -> PutResult:
        """Return its result from the response of a txn.

        Arguments:
            response: of the member.
            space: keys as the client sees them.
            revision: of the store after the txn.
        """
        return self.result(response.response_put, space)


@dataclass(frozen=True, slots=True)
class GetRange:
    """A read of an interval, made by ``get_range``."""

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

    @property
    def writes(self) -> bool:
        """Never."""
        return False

    def leases(self) -> tuple[LeaseLike | None, ...]:
        """None."""
        return ()

    def request(self, space: Space) -> rpc_pb2.RangeRequest:
        """Return the request message."""
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
            # Said in full: with the order left open, members apply the limit before they sort.
            order = rpc_pb2.RangeRequest.DESCEND if self.descending else rpc_pb2.RangeRequest.ASCEND
            request.sort_order, request.sort_target = order, _sort_target(self.sort_by)
        return request

    def result(self, answer: rpc_pb2.RangeResponse, space: Space, revision: int) -> RangeResult:
        """Return the result of the answer.

        Arguments:
            answer: of the member.
            space: keys as the client sees them.
            revision: of the store, where the answer does not say it.
        """
        return RangeResult(space.key_values(answer.kvs), answer.count, answer.more, revision)

    def to_message(self, space: Space) -> rpc_pb2.RequestOp:
        """Return its message in a txn."""
        return rpc_pb2.RequestOp(request_range=self.request(space))

    def from_message(self, response: rpc_pb2.ResponseOp, space: Space, revision: int) -> RangeResult:
        """Return its result from the response of a txn.

        Arguments:
            response: of the member.
            space: keys as the client sees them.
            revision: of the store after the txn.
        """
        return self.result(response.response_range, space, revision)


@dataclass(frozen=True, slots=True)
class Get:
    """A read of one key, made by ``get``."""

    key: Text
    revision: int = 0
    serializable: bool = False

    @property
    def writes(self) -> bool:
        """Never."""
        return False

    def leases(self) -> tuple[LeaseLike | None, ...]:
        """None."""
        return ()

    def request(self, space: Space) -> rpc_pb2.RangeRequest:
        """Return the request message."""
        return rpc_pb2.RangeRequest(key=space.key(self.key), revision=self.revision, serializable=self.serializable)

    def to_message(self, space: Space) -> rpc_pb2.RequestOp:
        """Return its message in a txn."""
        return rpc_pb2.RequestOp(request_range=self.request(space))

    def from_message(self, response: rpc_pb2.ResponseOp, space: Space, revision: int) -> KeyValue | None:
        """Return its result from the response of a txn.

        Arguments:
            response: of the member.
            space: keys as the client sees them.
            revision: of the store after the txn.
        """
        kvs = response.response_range.kvs
        return space.key_value(kvs[0]) if kvs else None


@dataclass(frozen=True, slots=True)
class Delete:
    """A deletion, made by ``delete``."""

    key: Text
    end: Text | None = None
    prefix: bool = False
    prev_kv: bool = False

    @property
    def writes(self) -> bool:
        """Always: even if nothing is there to delete, it has to be agreed on."""
        return True

    def leases(self) -> tuple[LeaseLike | None, ...]:
        """None."""
        return ()

    def request(self, space: Space) -> rpc_pb2.DeleteRangeRequest:
        """Return the request message."""
        key, end = space.interval(self.key, self.end, prefix=self.prefix)
        return rpc_pb2.DeleteRangeRequest(key=key, range_end=end, prev_kv=self.prev_kv)

    def result(self, answer: rpc_pb2.DeleteRangeResponse, space: Space) -> DeleteResult:
        """Return the result of the answer.

        Arguments:
            answer: of the member.
            space: keys as the client sees them.
        """
        return DeleteResult(answer.header.revision, answer.deleted, space.key_values(answer.prev_kvs))

    def to_message(self, space: Space) -> rpc_pb2.RequestOp:
        """Return its message in a txn."""
        return rpc_pb2.RequestOp(request_delete_range=self.request(space))

    def from_message(self, response: rpc_pb2.ResponseOp, space: Space, revision: int) -> DeleteResult:
        """Return its result from the response of a txn.

        Arguments:
            response: of the member.
            space: keys as the client sees them.
            revision: of the store after the txn.
        """
        return self.result(response.response_delete_range, space)


put = Put
"""``put(key, value=b"", lease=None, prev_kv=False, ignore_value=False, ignore_lease=False)`` in a txn."""
get = Get
"""``get(key, revision=0, serializable=False)`` in a txn; its result is a ``KeyValue`` or None."""
get_range = GetRange
"""``get_range(key, end=None, prefix=False, limit=0, ...)`` in a txn; its result is a ``RangeResult``."""
delete = Delete
"""``delete(key, end=None, prefix=False, prev_kv=False)`` in a txn."""
