"""The standard gRPC health service, for the server as a whole, as etcd serves it."""

from __future__ import annotations

import asyncio
from typing import Final

from raftkv import errors
from raftkv.pb import health_pb2
from raftkv.pb.services import SERVICES
from raftkv.replica.node.admission import parse_or_raise
from raftkv.rpc.server.calls import UnaryCall
from raftkv.rpc.server.server import Server
from raftkv.rpc.server.stream import StreamCall
from raftkv.server.services.responder import parse

_METHODS: Final = SERVICES["grpc.health.v1.Health"]
_SERVING: Final = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING).SerializeToString()
_UNKNOWN: Final = health_pb2.HealthCheckResponse(
    status=health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
).SerializeToString()
_LIST: Final = health_pb2.HealthListResponse(
    statuses={"": health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)}
).SerializeToString()


def register(server: Server) -> None:
    """Serve Check, List and Watch."""
    server.unary(_METHODS["Check"].path, _check)
    server.unary(_METHODS["List"].path, _list)
    server.stream(_METHODS["Watch"].path, _watch)


def _check(call: UnaryCall, data: bytes) -> None:
    request = parse(call, health_pb2.HealthCheckRequest, data)
    if request is None:
        return
    if request.service:
        call.fail(errors.NOT_FOUND, "unknown service")
    else:
        call.reply(_SERVING)


def _list(call: UnaryCall, data: bytes) -> None:
    if parse(call, health_pb2.HealthListRequest, data) is not None:
        call.reply(_LIST)


async def _watch(call: StreamCall) -> None:
    known = not parse_or_raise(health_pb2.HealthCheckRequest, await call.receive()).service
    await call.send(_SERVING if known else _UNKNOWN)
    # The status never changes while the server runs; the stream ends when the client leaves or the server stops.
    await asyncio.get_running_loop().create_future()
