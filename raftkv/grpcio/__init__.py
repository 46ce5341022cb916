"""etcd's services as typed stubs on a grpcio channel, for programs that already use grpcio.

::

    import grpc
    from raftkv import grpcio
    from raftkv.pb import rpc_pb2

    channel = grpc.insecure_channel("ipv4:10.0.0.1:2379,10.0.0.2:2379", options=grpcio.OPTIONS)
    kv = grpcio.KV(channel)                                     # an intercepted channel works too
    kv.put(rpc_pb2.PutRequest(key=b"a", value=b"1"), timeout_s=5)
    for answer in grpcio.Watch(channel).watch(iter(requests)): ...

    kv = grpcio.aio.KV(grpc.aio.insecure_channel(...))          # the same with await
    await kv.put(rpc_pb2.PutRequest(key=b"a", value=b"1"))

The channel belongs to the program, with its credentials, interceptors and tracing. Failures are raised as errors of
``raftkv.errors`` (``error_of``), with grpcio's error as the cause; ``is_transient`` tells which are temporary. The
channel options ``OPTIONS`` make grpcio retry the calls that are safe to repeat. Methods have raftkv's names
(``lease_grant``); messages are those of ``raftkv.pb`` or of any other package for etcd's protocol.

The stubs are built from the descriptors in ``raftkv.pb``, their types (``services.pyi``, ``aio.pyi``) by ``make
proto``.

Not here: what the library does beyond calls, that is, failover, tokens, and resumption of watches and leases.
"""

from __future__ import annotations

from raftkv.errors import ConfigError

try:
    import grpc as _grpc  # noqa: F401
except ModuleNotFoundError:
    raise ConfigError("raftkv.grpcio needs grpcio: pip install 'raftkv[grpcio]'") from None

from raftkv.client.rpc.retry import is_transient
from raftkv.grpcio import aio
from raftkv.grpcio.calls import OPTIONS, Answers, AsyncAnswers, AsyncStream, AsyncUnary, Stream, Unary
from raftkv.grpcio.failures import error_of
from raftkv.grpcio.services import KV, Admin, Auth, Cluster, Election, Health, Lease, Lock, Maintenance, Watch

__all__ = [
    "KV", "OPTIONS", "Admin", "Answers", "AsyncAnswers", "AsyncStream", "AsyncUnary", "Auth", "Cluster", "Election",
    "Health", "Lease", "Lock", "Maintenance", "Stream", "Unary", "Watch", "aio", "error_of", "is_transient",
]  # fmt: skip
