"""The KV service: reads, writes, transactions, compaction.

Owns the path of a request through this member: it is parsed and checked, then proposed (writes), confirmed with the
leader (linearizable reads) or answered at once (serializable reads). Handlers are plain callbacks, without a task per
call; the object that waits for the outcome holds the call and answers it.

    Put -> check -> node.submit(bytes) ... entry applied -> PendingWrite.finish -> header + body -> call.reply
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from raftkv import errors
from raftkv.apply import check, compares, ranges, txn, wire
from raftkv.apply.applier import Outcome
from raftkv.apply.auth.rights import Rights
from raftkv.apply.wire import Caller, Kind
from raftkv.loop.scheduler import Work
from raftkv.pb import rpc_pb2
from raftkv.pb.services import SERVICES
from raftkv.rpc.server.calls import UnaryCall
from raftkv.rpc.server.server import Server
from raftkv.server.services.responder import PendingRead, PendingWrite, Responder, fail, parse
from raftkv.storage.mvcc import Store
from raftkv.storage.selection import finish

_log = logging.getLogger(__name__)
_METHODS: Final = SERVICES["etcdserverpb.KV"]

KEYS_AT_ONCE: Final = 128
BYTES_AT_ONCE: Final = 512 * 1024
"""Ranges with more keys, or with larger values, are read in slices."""
KEYS_OF_TXN_AT_ONCE: Final = 8
"""Read-only transactions over more keys are read in slices: each value may be as large as a request."""
KEYS_OF_SHORT_TXN: Final = 64
"""The work of transactions over more keys is estimated in slices, which looks at some values."""
TXN_BYTES_AT_ONCE: Final = 8 * 1024
"""Larger transactions are checked in slices: 8 KiB may have a thousand operations, which take 3 ms."""
LARGE_BYTES: Final = 64 * 1024
S_PER_BYTE: Final = 1e-9
"""Approximate time for reading a byte of a large value, so that many large values are not read in one loop pass."""


class _PendingCompaction(PendingWrite):
    """Answers a physical compaction once the old revisions are deleted from the disk."""

    __slots__ = ()

    def finish(self, outcome: Outcome) -> None:
        if outcome.error is not None:
            fail(self.call, outcome.error)
        else:
            self.service.applier.when_compacted(lambda: self.service.reply(self.call, self.service.revision()))


class KVService:
    """Handlers of etcdserverpb.KV.

    Arguments:
        responder: shared parts of the member.
        txn_operations_max: etcd's max-txn-ops.
    """

    def __init__(self, responder: Responder, txn_operations_max: int) -> None:
        self._responder = responder
        self._node = responder.node
        self._applier = responder.applier
        self._auth = responder.auth
        self._store = responder.applier.store
        self._admission = responder.admission
        self._txn_operations_max = txn_operations_max

    def register(self, server: Server) -> None:
        """Serve the unary methods."""
        server.unary(_METHODS["Range"].path, self.range)
        server.unary(_METHODS["Put"].path, self.put)
        server.unary(_METHODS["DeleteRange"].path, self.delete_range)
        server.unary(_METHODS["Txn"].path, self.txn)
        server.unary(_METHODS["Compact"].path, self.compact)

    def range(self, call: UnaryCall, data: bytes) -> None:
        """Read a range from this member, confirmed with the leader if the read is linearizable."""
        get = wire.decode_get(data)
        if get is not None:
            self._read(call, get, get.serializable, self._serve_get)
            return
        request = parse(call, rpc_pb2.RangeRequest, data, check.check_range)
        if request is not None:
            self._read(call, request, request.serializable, self._serve_range)

    def _read(self, call: UnaryCall, request: Any, serializable: bool, serve: Callable[[UnaryCall, Any], None]) -> None:
        """Serve a read as soon as this member is recent enough."""
        try:
            staleness_s_max = self._admission.check_bounded_read(call, serializable, request)
            if serializable and staleness_s_max is None:
                serve(call, request)
            else:
                self._node.read(PendingRead(call, request, serve), staleness_s_max)
        except errors.StatusError as error:
            fail(call, error)

    def _serve_get(self, call: UnaryCall, get: wire.PlainGet) -> None:
        if call.cancelled:
            return
        if self._responder.slices.is_late:
            self._serve_range(call, get.message())
            return
        try:
            if self._auth.is_enabled:
                self._responder.check_again(call, lambda rights, caller: rights.check_read(caller, get.key, b""))
            revision, body = ranges.get(self._store, get.key)
        except Exception as error:
            self._responder.refuse_read(call, error)
            return
        self._reply_read(call, revision, body)

    def _serve_range(self, call: UnaryCall, request: rpc_pb2.RangeRequest) -> None:
        if call.cancelled:
            return
        slices = self._responder.slices

        def check_rights(rights: Rights, caller: Caller | None) -> None:
            rights.check_read(caller, request.key, request.range_end)

        try:
            if self._auth.is_enabled:
                self._responder.check_again(call, check_rights)
            if request.range_end or slices.is_late:
                answer = None
                if not slices.is_late:
                    answer = ranges.execute_small(self._store, request, KEYS_AT_ONCE, BYTES_AT_ONCE)
                if answer is None:
                    size = self._store.known_count(request.key, request.range_end)
                    self._responder.read_in_slices(call, partial(ranges.in_pieces, request=request), size, check_rights)
                    return
                revision, body = answer
            else:
                revision, body = ranges.execute(self._store, request)
        except Exception as error:
            self._responder.refuse_read(call, error)
            return
        self._reply_read(call, revision, body)

    def _reply_read(self, call: UnaryCall, revision: int, body: bytes) -> None:
        if len(body) > LARGE_BYTES:
            self._responder.slices.spend(len(body) * S_PER_BYTE)
        self._responder.reply(call, revision, body)

    def put(self, call: UnaryCall, data: bytes) -> None:
        """Write one key."""
        put = wire.decode_put(data)
        if put is not None:
            self._responder.propose(call, Kind.PUT, data, put)
            return
        request = parse(call, rpc_pb2.PutRequest, data, check.check_put)
        if request is not None:
            self._propose(call, Kind.PUT, data, request, partial(txn.work_of_operation, txn.PUT))

    def _propose(
        self, call: UnaryCall, kind: int, data: bytes, request: Any, work_of: Callable[[Store, Any], int]
    ) -> None:
        """Propose a write whose work is known without reading values, or answer why not."""
        try:
            work = work_of(self._store, request)
        except Exception as error:
            self._responder.refuse_read(call, error)
            return
        self._responder.propose(call, kind, data, request, work=work)

    def delete_range(self, call: UnaryCall, data: bytes) -> None:
        """Delete a range."""
        request = parse(call, rpc_pb2.DeleteRangeRequest, data, check.check_delete_range)
        if request is not None:
            self._propose(call, Kind.DELETE_RANGE, data, request, partial(txn.work_of_operation, txn.DELETE))

    def txn(self, call: UnaryCall, data: bytes) -> None:
        """Compare and write; a read-only transaction is not logged."""
        decoded = wire.decode_txn(data, self._txn_operations_max)
        if decoded is not None and decoded.writes:
            self._propose(call, Kind.TXN, data, decoded, txn.work_of_plain)
            return
        request = parse(call, rpc_pb2.TxnRequest, data)
        if request is None:
            return
        try:
            if len(data) <= TXN_BYTES_AT_ONCE:
                intervals = check.check_txn(request, self._txn_operations_max)
                if txn.is_readonly(request):
                    self._take_txn(call, data, request)
                    return
                if not intervals and txn.keys_of(self._store, request) <= KEYS_OF_SHORT_TXN:
                    self._take_txn(call, data, request, finish(txn.work_of(self._store, request)))
                    return
        except Exception as error:
            self._responder.refuse_read(call, error)
            return
        self._responder.check_in_slices(call, partial(self._check_and_take_txn, call, data, request))

    def _check_and_take_txn(self, call: UnaryCall, data: bytes, request: rpc_pb2.TxnRequest) -> Work[None]:
        """Check a transaction that is large, or has ranges, then execute it."""
        if call.cancelled:
            return
        intervals = yield from check.check_txn_in_pieces(request, self._txn_operations_max)
        work = 0
        if not txn.is_readonly(request):
            work = yield from compares.check_work(self._store, intervals)
            work += yield from txn.work_of(self._store, request)
        if not call.cancelled:
            self._take_txn(call, data, request, work)

    def _take_txn(self, call: UnaryCall, data: bytes, request: rpc_pb2.TxnRequest, work: int = 0) -> None:
        """Propose a checked transaction, or execute it as a read."""
        if not txn.is_readonly(request):
            self._responder.propose(call, Kind.TXN, data, request, work=work)
            return
        self._read(call, request, txn.is_serializable(request), self._serve_txn)

    def _serve_txn(self, call: UnaryCall, request: rpc_pb2.TxnRequest) -> None:
        if call.cancelled:
            return

        def check_rights(rights: Rights, caller: Caller | None) -> None:
            rights.check_txn(request, caller)

        if self._auth.is_enabled:
            try:
                self._responder.check_again(call, check_rights)
            except errors.StatusError as error:
                fail(call, error)
                return
        size = self._txn_size(request)
        if size > KEYS_OF_TXN_AT_ONCE or self._responder.slices.is_late:
            self._responder.read_in_slices(call, partial(txn.read_in_pieces, request=request), size, check_rights)
            return
        try:
            outcome = self._applier.read_txn(request)
        except Exception as error:
            self._responder.refuse_read(call, error)
            return
        self._responder.reply(call, outcome.revision, outcome.body)

    def _txn_size(self, request: rpc_pb2.TxnRequest) -> int:
        """Return about how many keys a read-only transaction reads."""
        known_count = self._store.known_count
        size = sum(known_count(compare.key, compare.range_end) for compare in request.compare)
        for operations in (request.success, request.failure):
            read = (operation.request_range for operation in operations)
            size += sum(known_count(range_.key, range_.range_end) for range_ in read)
        return size

    def compact(self, call: UnaryCall, data: bytes) -> None:
        """Compact the history up to a revision."""
        request = parse(call, rpc_pb2.CompactionRequest, data)
        if request is not None:
            waiter = _PendingCompaction if request.physical else PendingWrite
            self._responder.propose(call, Kind.COMPACT, data, request, waiter)
