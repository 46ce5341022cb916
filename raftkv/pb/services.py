"""The services of the wire contract: one ``Method`` for every RPC.

>>> SERVICES["etcdserverpb.KV"]["Put"].path
'/etcdserverpb.KV/Put'
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from google.protobuf import descriptor_pb2, message_factory

from raftkv.pb._pool import POOL

FILES = ("rpc", "lock", "election", "health", "raft", "admin")


@dataclass(frozen=True, slots=True)
class Method:
    """One RPC: where it is called, what it takes and gives, and which sides stream."""

    path: str
    request: type[Any]
    response: type[Any]
    client_streaming: bool
    server_streaming: bool


def _methods(service: Any) -> dict[str, Method]:
    proto = descriptor_pb2.ServiceDescriptorProto()
    service.CopyToProto(proto)
    return {
        method.name: Method(
            path=f"/{service.full_name}/{method.name}",
            request=message_factory.GetMessageClass(service.methods_by_name[method.name].input_type),
            response=message_factory.GetMessageClass(service.methods_by_name[method.name].output_type),
            client_streaming=method.client_streaming,
            server_streaming=method.server_streaming,
        )
        for method in proto.method
    }


SERVICES: dict[str, dict[str, Method]] = {
    service.full_name: _methods(service)
    for file in FILES
    for service in POOL.FindFileByName(f"raftkv/pb/{file}.proto").services_by_name.values()
}
"""Full service name to method name to method."""
