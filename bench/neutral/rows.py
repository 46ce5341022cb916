"""What the neutral mode measures: unary calls as bytes, and loads of streams by the words of `raftkvctl bench`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from bench.compare import Row as Streams
from raftkv.client.rpc import methods
from raftkv.pb import rpc_pb2
from raftkv.rpc.framing import frame

KEY = b"neutral/key"
VALUE = b"v" * 256
PUT = rpc_pb2.PutRequest(key=KEY, value=VALUE)
LEASE = rpc_pb2.LeaseGrantRequest(ID=0x1234, TTL=3600)


def _as_read(read: rpc_pb2.RangeResponse) -> rpc_pb2.RangeResponse:
    return read


@dataclass(frozen=True)
class Calls:
    """Calls that are all the same bytes: h2load takes one body.

    Attributes:
        connections: of the generator.
        streams: calls under way on each connection.
        revisions: that each call adds to the store; 0: it reads.
        messages: requests of one call; 0: the call is unary.
        answer: what a call that adds nothing brings back for a request, by a range of the key that was read meanwhile.
    """

    name: str
    path: str
    message: bytes
    connections: int
    streams: int = 1
    revisions: int = 0
    messages: int = 0
    answer: Callable[[rpc_pb2.RangeResponse], Any] = _as_read

    @property
    def requests(self) -> int:
        """How many requests a call has."""
        return max(1, self.messages)

    @property
    def clients(self) -> int:
        """Calls under way at a time."""
        return self.connections * self.streams

    @property
    def body(self) -> bytes:
        """The messages as gRPC frames them."""
        return bytes(frame(self.message)) * self.requests


def _put(connections: int, streams: int = 1) -> Calls:
    name = f"put-c{connections}" + (f"x{streams}" if streams > 1 else "")
    return Calls(name, methods.PUT.path, PUT.SerializeToString(), connections, streams, revisions=1)


def _range(name: str, *, serializable: bool) -> Calls:
    request = rpc_pb2.RangeRequest(key=KEY, serializable=serializable)
    return Calls(name, methods.RANGE.path, request.SerializeToString(), 100)


def _kept(read: rpc_pb2.RangeResponse) -> rpc_pb2.LeaseKeepAliveResponse:
    return rpc_pb2.LeaseKeepAliveResponse(header=read.header, ID=LEASE.ID, TTL=LEASE.TTL)


_keep = partial(
    Calls,
    path=methods.LEASE_KEEP_ALIVE.path,
    message=rpc_pb2.LeaseKeepAliveRequest(ID=LEASE.ID).SerializeToString(),
    connections=100,
    answer=_kept,
)
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
    _keep("lease-keepalive-once-c100", messages=1),
    _keep("lease-keepalive-ten-c100", messages=10),
)

STREAMS = (
    Streams("lease-keepalive-c100", ("lease-keepalive",), 100, 10, 2, 25_000, "streams"),
    Streams(
        "watch-1000-on-1-key",
        ("watch", "--streams", "100", "--watch-per-stream", "10"),
        *(16, 10, 2, 1_000, "streams", "rate", "put_"),
    ),
)
"""Streams on which one request follows the answer to another, which h2load cannot send: the generator is `raftkvctl
bench`. Totals are those of a second."""

ROWS: tuple[Calls | Streams, ...] = (*CALLS, *STREAMS)
