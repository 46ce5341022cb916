"""Frames by hand: floods of small ones, and answers for which there is no room."""

from __future__ import annotations

import asyncio
import gzip

from bench.hostile.attacker import EVERYTHING, KV, Attacker, RawConnection, grpc_request
from bench.hostile.rows.row import Row
from raftkv.pb import rpc_pb2
from tests.rpc import raw

_PER_WRITE = 1000
_RECONNECT_PAUSE_S = 0.01


async def _flood(attacker: Attacker, frames: bytes, first: bytes = b"") -> None:
    """The same frames on one connection after the other, as fast as the member takes them."""
    while not attacker.is_over():
        connection = await _open(attacker)
        if connection is None:
            continue
        connection.discard_answers()
        try:
            await connection.send(first)
            await connection.send_until(frames, attacker.until)
        finally:
            connection.close()
        attacker.refused("connection closed")


async def _open(attacker: Attacker) -> RawConnection | None:
    await asyncio.sleep(_RECONNECT_PAUSE_S)
    try:
        return await attacker.connect()
    except OSError as error:
        attacker.refused(f"connect: {error.strerror}")
        return None


async def _pings(attacker: Attacker) -> None:
    await _flood(attacker, raw.frame(raw.PING, 0, 0, b"12345678") * _PER_WRITE)


async def _settings(attacker: Attacker) -> None:
    await _flood(attacker, raw.settings((3, 100)) * _PER_WRITE)


async def _window_updates(attacker: Attacker) -> None:
    open_stream = raw.headers(1, raw.grpc_headers("/etcdserverpb.Watch/Watch"))
    update = raw.frame(raw.WINDOW_UPDATE, 0, 0, (1).to_bytes(4, "big"))
    on_stream = raw.frame(raw.WINDOW_UPDATE, 0, 1, (1).to_bytes(4, "big"))
    await _flood(attacker, (update + on_stream) * (_PER_WRITE // 2), open_stream)


async def _tiny_data(attacker: Attacker) -> None:
    """A message of 2 MB, a byte in each frame, while its window lasts; then the next connection."""
    open_stream = raw.headers(1, raw.grpc_headers(KV + "Put"))
    head = raw.message(1, b"\0" + (1 << 20).to_bytes(4, "big"))
    await _flood(attacker, raw.message(1, b"x") * _PER_WRITE, open_stream + head)


async def _resets(attacker: Attacker) -> None:
    """Requests that are taken back at once; stream ids never come again, so each write has its own."""
    while not attacker.is_over():
        connection = await _open(attacker)
        if connection is None:
            continue
        connection.discard_answers()
        request = rpc_pb2.RangeRequest(key=EVERYTHING, range_end=EVERYTHING, limit=10)
        stream_id, alive = 1, True
        while alive and not attacker.is_over():
            block = b"".join(
                grpc_request(number, KV + "Range", request) + raw.reset(number)
                for number in range(stream_id, stream_id + 200, 2)
            )
            stream_id += 200
            alive = await connection.send(block)
            await asyncio.sleep(0)
        connection.close()
        attacker.refused("connection closed")


async def _fill_20mb(attacker: Attacker) -> None:
    await attacker.fill(attacker.count(2_000, 10), value=b"v" * 10_000)


async def _closed_window(attacker: Attacker) -> None:
    """Full reads whose answers have no window: 500 requests, 74 KB in all, for 10 GB of answers."""
    connection = await attacker.connect(window_bytes=0)
    connection.discard_answers()
    request = rpc_pb2.RangeRequest(key=EVERYTHING, range_end=EVERYTHING)
    try:
        for number in range(attacker.count(100, 10)):
            await connection.send(grpc_request(2 * number + 1, KV + "Range", request))
        await attacker.until_over()
    finally:
        connection.close()


async def _fill_1000_large(attacker: Attacker) -> None:
    await attacker.fill(attacker.count(1_000, 5), value=b"v" * 1_000_000)


async def _slow_readers(attacker: Attacker) -> None:
    """Twenty connections that ask for every large value and read 200 KB a second."""
    keys, connections = attacker.count(1_000, 5), [await attacker.connect(1 << 20) for _ in range(20)]
    try:
        for connection in connections:
            connection.discard_answers(bytes_per_s=200_000)
            for number in range(keys):
                request = rpc_pb2.RangeRequest(key=b"fill/%08d" % number)
                if not await connection.send(grpc_request(2 * number + 1, KV + "Range", request)):
                    break
        await attacker.until_over()
    finally:
        for connection in connections:
            connection.close()


async def _halves(attacker: Attacker) -> None:
    """Ten connections with a hundred puts each, of 1 MB, that never end."""
    connections = [await attacker.connect() for _ in range(10)]
    body = b"\0" + (1_000_000).to_bytes(4, "big") + b"x" * 16_000
    try:
        for connection in connections:
            connection.discard_answers()
            for number in range(attacker.count(100, 5)):
                stream_id = 2 * number + 1
                frames = raw.headers(stream_id, raw.grpc_headers(KV + "Put")) + raw.message(stream_id, body)
                if not await connection.send(frames):
                    attacker.refused("connection closed")
                    break
        await attacker.until_over()
    finally:
        for connection in connections:
            connection.close()


async def _packed(attacker: Attacker) -> None:
    """Messages of 2 MB that are 2 KB on the wire, one behind the other: puts, and requests of keep-alive streams."""
    await asyncio.gather(*(_bombs(attacker) for _ in range(attacker.connections(20))))


async def _bombs(attacker: Attacker) -> None:
    data = gzip.compress(rpc_pb2.PutRequest(key=b"k", value=bytes(2_000_000)).SerializeToString())
    message = b"\1" + len(data).to_bytes(4, "big") + data
    extra = (b"grpc-encoding", b"gzip")
    put, keep = (raw.grpc_headers(path, extra) for path in (KV + "Put", "/etcdserverpb.Lease/LeaseKeepAlive"))
    while not attacker.is_over():
        connection = await _open(attacker)
        if connection is None:
            continue
        connection.discard_answers()
        stream_id, alive = 1, True
        while alive and not attacker.is_over():
            calls = b"".join(
                raw.headers(number, put)
                + raw.message(number, message, raw.END_STREAM)
                + raw.headers(number + 2, keep)
                + raw.message(number + 2, message * 7)
                + raw.reset(number + 2)
                for number in range(stream_id, stream_id + 40, 4)
            )
            stream_id += 40
            alive = await connection.send(calls)
            await asyncio.sleep(0)
        connection.close()
        attacker.refused("connection closed")


ROWS = (
    Row("flood-ping", "PING frames as fast as they are taken", _pings),
    Row("flood-settings", "SETTINGS frames as fast as they are taken", _settings),
    Row("flood-window-update", "WINDOW_UPDATE frames of one byte as fast as they are taken", _window_updates),
    Row("flood-tiny-data", "DATA frames of one byte as fast as they are taken", _tiny_data),
    Row("flood-reset", "requests that are reset at once, as fast as they are taken", _resets),
    Row("closed-window", "100 reads of 20 MB each that have no window for the answers", _closed_window, _fill_20mb),
    Row("slow-readers", "20 clients read 1,000 values of 1 MB, 200 KB a second", _slow_readers, _fill_1000_large),
    Row("gzip", "20 connections with compressed messages of 2 KB that are 2 MB", _packed),
    Row("unfinished", "1,000 puts of 1 MB of which 16 KB come", _halves),
)
