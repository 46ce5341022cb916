"""KV.RangeStream: a range in chunks, so that neither side holds a large answer in one piece.

The first chunk fixes the revision. Header, more and count come with the last chunk, so merging all chunks gives the
response of Range. Chunk sizes are adjusted towards ``max-request-bytes``, as in etcd 3.7.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from raftkv import errors
from raftkv.apply import check, wire
from raftkv.loop.scheduler import Work, hold
from raftkv.pb import rpc_pb2
from raftkv.pb.services import SERVICES
from raftkv.replica.node.admission import parse_or_raise, refusals
from raftkv.rpc.server.server import Server
from raftkv.rpc.server.stream import StreamCall
from raftkv.rpc.shares import queue_of_call
from raftkv.server.services.responder import Responder
from raftkv.storage.key_value import key_of
from raftkv.storage.mvcc_range import PinnedView
from raftkv.storage.selection import Selection, collect

_PATH: Final = SERVICES["etcdserverpb.KV"]["RangeStream"].path
FIRST_CHUNK_KEYS: Final = 10


class RangeStreamService:
    """Handler of KV.RangeStream.

    Arguments:
        responder: shared parts of the member.
        chunk_bytes: target size of chunks.
    """

    def __init__(self, responder: Responder, chunk_bytes: int) -> None:
        self._responder = responder
        self._store = responder.applier.store
        self._chunk_bytes = chunk_bytes

    def register(self, server: Server) -> None:
        """Register the handler."""
        server.stream(_PATH, self.range_stream)

    async def range_stream(self, call: StreamCall) -> None:
        """Read a range in chunks."""
        request = parse_or_raise(rpc_pb2.RangeRequest, await call.receive())
        with refusals(self._responder.node):
            await self._serve(call, request)

    async def _serve(self, call: StreamCall, request: rpc_pb2.RangeRequest) -> None:
        check.check_range(request)
        _check_streamable(request)
        staleness_s_max = self._responder.admission.check_bounded_read(call, request.serializable, request)
        if not request.serializable or staleness_s_max is not None:
            await self._responder.node.confirm_read(staleness_s_max)
        slices, size = self._responder.slices, self._store.known_count(request.key, request.range_end)
        revision, header_revision, count = await slices.result(partial(self._count, request), size, queue_of_call(call))
        # All chunks are read at this revision, so one check here covers those that are read later.
        self._responder.check_on(call, lambda rights, caller: rights.check_read(caller, request.key, request.range_end))
        limit = request.limit if 0 < request.limit < count else count
        kvs: list[bytes] = []
        if not request.count_only:
            kvs = await self._send_all_but_last(call, request, revision, limit)
        header = self._responder.header.encode(header_revision, self._responder.node.term)
        more = limit < count and not request.count_only
        await call.send(wire.field(1, header + wire.range_body(kvs, more, count)))

    def _count(self, request: rpc_pb2.RangeRequest) -> Work[tuple[int, int, int]]:
        """Return the revision to read at, the revision of the store, and the number of keys."""

        def read(view: PinnedView) -> Work[tuple[int, int, int]]:
            # The view has the current revision. At an older revision, counting walks over the keys.
            revision = request.revision if request.revision > 0 else view.revision
            selection = Selection(count_only=True)
            _, found = yield from collect(view.select(request.key, request.range_end, selection, revision=revision))
            return revision, view.revision, found.count if found is not None else 0

        return hold(self._store.pin, read)

    async def _send_all_but_last(
        self, call: StreamCall, request: rpc_pb2.RangeRequest, revision: int, limit: int
    ) -> list[bytes]:
        """Send ``limit`` keys of one revision in chunks. Returns the last chunk, which ends the answer."""
        key, keys_max = request.key, FIRST_CHUNK_KEYS
        while True:
            selection = Selection(limit=min(keys_max, limit), keys_only=request.keys_only, counts=False)
            page = partial(self._page, key, request.range_end, selection, revision)
            kvs = await self._read(call, page, keys_max) if limit else []
            limit -= len(kvs)
            if limit <= 0 or not kvs or not request.range_end:
                return kvs
            key = key_of(kvs[-1]) + b"\0"
            message = wire.field(1, wire.range_body(kvs, False, 0))
            keys_max = keys_max * 2 if len(message) * 2 <= self._chunk_bytes else max(1, keys_max // 2)
            del kvs
            await call.send(message)
            del message

    async def _read(self, call: StreamCall, page: Callable[[], Work[list[bytes]]], keys_max: int) -> list[bytes]:
        """Read when the client has room for it, which other streams may take before the turn of this read comes."""

        def work() -> Work[list[bytes] | None]:
            return (yield from page()) if call.has_room else None

        while True:
            await call.wait_for_room()
            kvs = await self._responder.slices.result(work, keys_max, queue_of_call(call))
            if kvs is not None:
                return kvs

    def _page(self, key: bytes, range_end: bytes, selection: Selection, revision: int) -> Work[list[bytes]]:
        """Return the next keys, until there are enough or they are large.

        Nothing is pinned between two pages: a slow reader keeps no history, and fails when its revision is compacted.
        """

        def read(view: PinnedView) -> Work[list[bytes]]:
            pieces = view.select(key, range_end, selection, revision=revision)
            kvs, _ = yield from collect(pieces, self._chunk_bytes)
            return kvs

        return hold(self._store.pin, read)


def _check_streamable(request: rpc_pb2.RangeRequest) -> None:
    is_by_key = request.sort_target == rpc_pb2.RangeRequest.KEY and request.sort_order == rpc_pb2.RangeRequest.ASCEND
    if request.sort_order != rpc_pb2.RangeRequest.NONE and not is_by_key:
        raise errors.UnimplementedError("RangeStream does not support custom sort orders")
    if (
        request.min_mod_revision
        or request.max_mod_revision
        or request.min_create_revision
        or request.max_create_revision
    ):
        raise errors.UnimplementedError("RangeStream does not support revision filters")
