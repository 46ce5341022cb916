"""Put, get, range, delete, count.

Owns the translation between Python's arguments and etcd's messages. ``put`` and ``get`` of a single key are the hot
path: a plain message, one await, one small result.

    await kv.put("jobs/a", b"1", lease=lease)
    item = await kv.get("jobs/a")                 # KeyValue or None
    for item in await kv.range("jobs/", prefix=True, limit=100): ...

A write with ``fence=lock`` is a txn on the condition that the lock is still held. Writes are repeated only if they
certainly did not happen; the ``definite`` of an error says whether that is so.
"""

from __future__ import annotations

from typing import Any

from raftkv.client.keys import Text, to_bytes
from raftkv.client.kv.compares import FenceLike, LeaseLike, fence_compares, lost_lease
from raftkv.client.kv.operations import Delete, GetRange, Operation, Put, SortBy
from raftkv.client.rpc import methods
from raftkv.client.scope import Part
from raftkv.client.values import DeleteResult, KeyValue, PutResult, RangeResult
from raftkv.errors import LeaseNotFoundError
from raftkv.pb import rpc_pb2


class KV(Part):
    """Reads and writes of keys."""

    async def put(
        self,
        key: Text,
        value: Text = b"",
        *,
        lease: LeaseLike | None = None,
        prev_kv: bool = False,
        ignore_value: bool = False,
        ignore_lease: bool = False,
        fence: FenceLike | None = None,
        timeout_s: float | None = None,
    ) -> PutResult:
        """Write a key.

        Arguments:
            key, value: text is written as UTF-8.
            lease: the key ends with it; None: it stays, and leaves the lease it had.
            prev_kv: return the key as it was before.
            ignore_value: keep the value, change the lease.
            ignore_lease: keep the lease, change the value.
            fence: write only while this lock or term is held, or this generation of a run lasts.
            timeout_s: of the call, all attempts together; None: the client's.

        Raises:
            LeaseLost: the lease cannot be relied on; nothing was written.
            FenceLost: the lock or term is over; nothing was written.
            StatusError: the cluster refused, or it is unknown what happened: see ``definite``.
        """
        scope = self.scope
        if lease is None and fence is None and not (prev_kv or ignore_value or ignore_lease):
            request = rpc_pb2.PutRequest(key=scope.space.key(key), value=to_bytes(value))
            answer = await scope.call(methods.PUT, request, timeout_s)
            return PutResult(answer.header.revision)
        operation = Put(key, value, lease, prev_kv, ignore_value, ignore_lease)
        try:
            if fence is not None:
                done: PutResult = await self._fenced(operation, fence, timeout_s)
                return done
            answer = await scope.call(methods.PUT, operation.request(scope.space), timeout_s)
        except LeaseNotFoundError:
            raise lost_lease((lease,)) or LeaseNotFoundError() from None
        return operation.result(answer, self.scope.space)

    async def get(
        self,
        key: Text,
        *,
        revision: int = 0,
        serializable: bool = False,
        max_staleness_s: float | None = None,
        timeout_s: float | None = None,
    ) -> KeyValue | None:
        """Read a key; None: it does not exist.

        Arguments:
            key: which.
            revision: as it was then; 0: as it is.
            serializable: ask one member alone: faster, and maybe old.
            max_staleness_s: the member that is asked, a learner too, may answer from what it has if that is certainly
                not older; it confirms the read with the others if it is. None: every read is confirmed.
            timeout_s: as for ``put``.

        Raises:
            Compacted: that revision is gone.
            StatusError: the cluster refused, or did not answer in time.
        """
        scope = self.scope
        request = rpc_pb2.RangeRequest(key=scope.space.key(key))
        if revision or serializable:
            request.revision, request.serializable = revision, serializable
        kvs = (await scope.call(methods.RANGE, request, timeout_s, max_staleness_s)).kvs
        return scope.space.key_value(kvs[0]) if kvs else None

    async def range(
        self,
        key: Text,
        end: Text | None = None,
        *,
        prefix: bool = False,
        limit: int = 0,
        revision: int = 0,
        sort_by: SortBy = "key",
        descending: bool = False,
        keys_only: bool = False,
        serializable: bool = False,
        min_mod_revision: int = 0,
        max_mod_revision: int = 0,
        min_create_revision: int = 0,
        max_create_revision: int = 0,
        max_staleness_s: float | None = None,
        timeout_s: float | None = None,
    ) -> RangeResult:
        """Read an interval in one answer; for a large one see ``pages``.

        Arguments:
            key: the first key, or the prefix.
            end: the first key that does not belong; ``"\\0"``: no end.
            prefix: all keys that begin with ``key``; ``""``: all keys.
            limit: at most so many; 0: all.
            revision, serializable, max_staleness_s, timeout_s: as for ``get``.
            sort_by, descending: the order; by key if not said.
            keys_only: leave the values out.
            min_mod_revision, max_mod_revision: only keys last written between these; 0: any.
            min_create_revision, max_create_revision: only keys created between these; 0: any.
        """
        operation = GetRange(
            key,
            end,
            prefix,
            limit,
            revision,
            sort_by,
            descending,
            keys_only,
            False,
            serializable,
            min_mod_revision,
            max_mod_revision,
            min_create_revision,
            max_create_revision,
        )
        return await self._range(operation, timeout_s, max_staleness_s)

    async def count(
        self,
        key: Text,
        end: Text | None = None,
        *,
        prefix: bool = False,
        revision: int = 0,
        serializable: bool = False,
        max_staleness_s: float | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Count the keys of an interval; arguments as for ``range``.

        Arguments:
            key, end, prefix: as for ``range``.
            revision, serializable, max_staleness_s, timeout_s: as for ``get``.
        """
        operation = GetRange(key, end, prefix, revision=revision, serializable=serializable, count_only=True)
        return (await self._range(operation, timeout_s, max_staleness_s)).count

    async def delete(
        self,
        key: Text,
        end: Text | None = None,
        *,
        prefix: bool = False,
        prev_kv: bool = False,
        fence: FenceLike | None = None,
        timeout_s: float | None = None,
    ) -> DeleteResult:
        """Delete a key or an interval, in one revision.

        Arguments:
            key, end, prefix: as for ``range``.
            prev_kv: return the keys as they were.
            fence, timeout_s: as for ``put``.

        Raises:
            FenceLost: the lock or term is over; nothing was deleted.
            StatusError: as for ``put``.
        """
        operation = Delete(key, end, prefix, prev_kv)
        if fence is not None:
            done: DeleteResult = await self._fenced(operation, fence, timeout_s)
            return done
        answer = await self.scope.call(methods.DELETE_RANGE, operation.request(self.scope.space), timeout_s)
        return operation.result(answer, self.scope.space)

    async def _range(self, operation: GetRange, timeout_s: float | None, max_staleness_s: float | None) -> RangeResult:
        answer = await self.scope.call(methods.RANGE, operation.request(self.scope.space), timeout_s, max_staleness_s)
        return operation.result(answer, self.scope.space, answer.header.revision)

    async def _fenced(self, operation: Operation, fence: FenceLike, timeout_s: float | None) -> Any:
        request = rpc_pb2.TxnRequest(compare=fence_compares(fence), success=[operation.to_message(self.scope.space)])
        answer = await self.scope.call(methods.TXN, request, timeout_s)
        if not answer.succeeded:
            raise fence.broken()
        revision = answer.header.revision
        return operation.from_message(answer.responses[0], self.scope.space, revision)
