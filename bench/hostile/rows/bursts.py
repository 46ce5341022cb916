"""Very many small requests that come at once, on many connections."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from bench.hostile.attacker import KV, Attacker
from bench.hostile.rows.row import Act, Row
from raftkv.pb import rpc_pb2
from raftkv.rpc.framing import frame as message_of
from raftkv.rpc.http2.hpack import Encoder
from tests.rpc import raw

CONNECTIONS: Final = 100
BURST_BYTES: Final = 400_000
"""What each connection brings at once; the kernel keeps it until the member reads."""


def _burst(method: str, request: Any, size_bytes: int) -> bytes:
    """Return so many bytes of the same request, whose header is a few octets from the second on."""
    fields = raw.grpc_headers(KV + method)
    encoder = Encoder(frozenset(name for name, _ in fields))
    body = message_of(request.SerializeToString())
    found = bytearray()
    stream_id = 1
    while len(found) < size_bytes:
        head = raw.frame(raw.HEADERS, raw.END_HEADERS, stream_id, encoder.encode(fields))
        found += head + raw.message(stream_id, body, raw.END_STREAM)
        stream_id += 2
    return bytes(found)


def _bursts(method: str, request: Any) -> Act:
    async def attack(attacker: Attacker) -> None:
        burst = _burst(method, request, attacker.count(BURST_BYTES, 4_000))
        while not attacker.is_over():
            connections = [await attacker.connect() for _ in range(attacker.connections(CONNECTIONS))]
            try:
                for connection in connections:
                    connection.discard_answers()
                await asyncio.gather(*[connection.send(burst) for connection in connections])
                await asyncio.sleep(0.5)
            finally:
                for connection in connections:
                    connection.close()

    return attack


_TXN = rpc_pb2.TxnRequest(
    success=[rpc_pb2.RequestOp(request_put=rpc_pb2.PutRequest(key=b"burst/%d" % number)) for number in range(40)]
)

ROWS = (
    Row(
        "burst-ranges",
        "100 connections that each bring 400 KB of small serializable reads at once",
        _bursts("Range", rpc_pb2.RangeRequest(key=b"a", serializable=True)),
    ),
    Row(
        "burst-puts",
        "100 connections that each bring 400 KB of small puts at once",
        _bursts("Put", rpc_pb2.PutRequest(key=b"burst/a", value=b"v")),
    ),
    Row("burst-txns", "100 connections that each bring 400 KB of txns of 40 puts at once", _bursts("Txn", _TXN)),
)
