"""The client on its real channel, with another implementation of gRPC at the other end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest

from raftkv import errors
from raftkv.client import Client
from raftkv.client.rpc import methods
from raftkv.pb import rpc_pb2


class Store(grpc.GenericRpcHandler):
    """Answers Range with the key it was asked for, Put with an error, Status never."""

    def service(self, details):
        handler = {"/etcdserverpb.KV/Range": self.range, "/etcdserverpb.KV/Put": self.put}.get(details.method)
        return grpc.unary_unary_rpc_method_handler(handler) if handler else None

    def range(self, request, context):
        key = rpc_pb2.RangeRequest.FromString(request).key
        pair = rpc_pb2.RangeResponse().kvs.add(key=key)
        return rpc_pb2.RangeResponse(kvs=[pair], count=1).SerializeToString()

    def put(self, request, context):
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, errors.NoSpaceError.text)


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=(Store(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_calls(endpoint):
    async def run():
        async with Client(["127.0.0.1:1", f"http://{endpoint}"]) as client:
            answers = await asyncio.gather(
                *(client.call(methods.RANGE, rpc_pb2.RangeRequest(key=b"%d" % n), timeout_s=10) for n in range(20))
            )
            assert [answer.kvs[0].key for answer in answers] == [b"%d" % n for n in range(20)]
            with pytest.raises(errors.NoSpaceError):
                await client.call(methods.PUT, rpc_pb2.PutRequest(key=b"k"), timeout_s=10)
            with pytest.raises(errors.StatusError, match=r"^rpc error: code = Unimplemented desc = "):
                await client.call_at(endpoint, methods.STATUS, rpc_pb2.StatusRequest(), timeout_s=10)

    asyncio.run(run())


def test_unreachable_server():
    async def run():
        async with Client(["127.0.0.1:1"]) as client:
            with pytest.raises(errors.ContextDeadlineExceededError):
                await client.call(methods.RANGE, rpc_pb2.RangeRequest(key=b"k"), timeout_s=0.2)

    asyncio.run(run())
