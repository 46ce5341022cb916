"""KV.RangeStream: a range in chunks, so that neither side holds a large answer whole.

The revision is pinned by the first chunk; header, more and count come with the last one, so that merging all chunks
gives the response of Range. Chunks grow and shrink towards ``max-request-bytes``, as in etcd 3.7.
"""

from __future__ import annotations

from typing import Final

from google.protobuf.message import DecodeError

from raftkv import errors
from raftkv.apply import check, response
from raftkv.pb import rpc_pb2
from raftkv.pb.services import SERVICES
from raftkv.rpc.server import Server
from raftkv.rpc.server_stream import StreamCall
from raftkv.rpc.status import RpcError
from raftkv.server.kv import Responder
from raftkv.server.waits import read_confirmed

_PATH: Final = SERVICES["etcdserverpb.KV"]["RangeStream"].path
FIRST_CHUNK_KEYS: Final = 10


class RangeStreamService:
    """Handler of KV.RangeStream.

    Arguments:
        responder: the member's shared parts.
        chunk_bytes: size that chunks aim at.
    """

    def __init__(self, responder: Responder, chunk_bytes: int) -> None:
        self._responder = responder
        self._store = responder.applier.store
        self._chunk_bytes = chunk_bytes

    def register(self, server: Server) -> None:
        """Serve it."""
        server.stream(_PATH, self.range_stream)

    async def range_stream(self, call: StreamCall) -> None:
        """Read an interval in chunks."""
        request = await _receive(call)
        try:
            await self._serve(call, request)
        except errors.StatusError as error:
            raise RpcError(error.code, str(error)) from None

    async def _serve(self, call: StreamCall, request: rpc_pb2.RangeRequest) -> None:
        check.check_range(request)
        _check_streamable(request)
        self._responder.admission.check_read(call, request.serializable)
        if not request.serializable:
            await read_confirmed(self._responder.node)
        revision = request.revision if request.revision > 0 else self._store.revision
        counted = self._store.range(request.key, request.range_end, revision=revision, count_only=True)
        limit = request.limit if 0 < request.limit < counted.count else counted.count
        kvs: list[bytes] = []
        if not request.count_only:
            kvs = await self._send_all_but_last(call, request, revision, limit)
        header = self._responder.header.encode(counted.revision, self._responder.node.term)
        more = limit < counted.count and not request.count_only
        await call.send(response.field(1, header + response.range_body(kvs, more, counted.count)))

    async def _send_all_but_last(
        self, call: StreamCall, request: rpc_pb2.RangeRequest, revision: int, limit: int
    ) -> list[bytes]:
        """Send ``limit`` keys as of one revision in chunks; the last chunk, which closes the answer, is returned."""
        key, keys_max = request.key, FIRST_CHUNK_KEYS
        while True:
            kvs = self._store.range(
                key, request.range_end, revision=revision, limit=min(keys_max, limit), keys_only=request.keys_only
            ).kvs
            limit -= len(kvs)
            if limit <= 0 or not kvs or not request.range_end:
                return kvs
            chunk = response.range_body(kvs, False, 0)
            await call.send(response.field(1, chunk))
            key = response.key_of(kvs[-1]) + b"\0"
            keys_max = keys_max * 2 if len(chunk) * 2 <= self._chunk_bytes else max(1, keys_max // 2)


async def _receive(call: StreamCall) -> rpc_pb2.RangeRequest:
    data = await call.receive()
    if data is None:
        raise RpcError(errors.INTERNAL, "a request is missing")
    try:
        return rpc_pb2.RangeRequest.FromString(data)
    except DecodeError as error:
        raise RpcError(errors.INTERNAL, f"grpc: error unmarshalling request: {error}") from None


def _check_streamable(request: rpc_pb2.RangeRequest) -> None:
    if request.sort_target != rpc_pb2.RangeRequest.KEY or request.sort_order == rpc_pb2.RangeRequest.DESCEND:
        raise errors.UnimplementedError("RangeStream does not support custom sort orders")
    if (
        request.min_mod_revision
        or request.max_mod_revision
        or request.min_create_revision
        or request.max_create_revision
    ):
        raise errors.UnimplementedError("RangeStream does not support revision filters")
