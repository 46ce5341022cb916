"""What the neutral mode measures: unary calls as bytes, and loads of streams by the words of `raftkvctl bench`."""

from __future__ import annotations

from dataclasses import dataclass

from bench.compare import Row as Streams
from raftkv.client.rpc import methods
from raftkv.pb import rpc_pb2
from raftkv.rpc.framing import frame

KEY = b"neutral/key"
VALUE = b"v" * 256
PUT = rpc_pb2.PutRequest(key=KEY, value=VALUE)


@dataclass(frozen=True)
class Calls:
    """Unary calls, all of them the same bytes: h2load takes one body.

    Attributes:
        connections: of the generator.
        streams: calls under way on each connection.
        revisions: that each call adds to the store; 0: it reads.
    """

    name: str
    path: str
    message: bytes
    connections: int
    streams: int = 1
    revisions: int = 0

    @property
    def clients(self) -> int:
        """Calls under way at a time."""
        return self.connections * self.streams

    @property
    def body(self) -> bytes:
        """The message as gRPC frames it."""
        return bytes(frame(self.message))


def _put(connections: int, streams: int = 1) -> Calls:
    name = f"put-c{connections}" + (f"x{streams}" if streams > 1 else "")
    return Calls(name, methods.PUT.path, PUT.SerializeToString(), connections, streams, revisions=1)


def _range(name: str, *, serializable: bool) -> Calls:
    request = rpc_pb2.RangeRequest(key=KEY, serializable=serializable)
    return Calls(name, methods.RANGE.path, request.SerializeToString(), 100)


_EXISTS = rpc_pb2.Compare(key=KEY, target=rpc_pb2.Compare.VERSION, result=rpc_pb2.Compare.GREATER, version=0)
_TXN = rpc_pb2.TxnRequest(compare=[_EXISTS], success=[rpc_pb2.RequestOp(request_put=PUT)])

CALLS = (
    _put(1),
    _put(10),
    _put(100),
    _put(100, 10),
    _range("range-linearizable-c100", serializable=False),
    _range("range-serializable-c100", serializable=True),
    Calls("txn-c100", methods.TXN.path, _TXN.SerializeToString(), 100, revisions=1),
)

STREAMS = (
    Streams("lease-keepalive-c100", ("lease-keepalive",), 100, 10, 2, 25_000, "streams"),
    Streams(
        "watch-1000-on-1-key",
        ("watch", "--streams", "100", "--watch-per-stream", "10"),
        *(16, 10, 2, 1_000, "streams", "rate", "put_"),
    ),
)
"""Bidirectional streams, which h2load cannot make: the generator is `raftkvctl bench`. Totals are those of a second."""

ROWS: tuple[Calls | Streams, ...] = (*CALLS, *STREAMS)
