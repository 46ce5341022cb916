"""Answers and events of 0.1 to 12 MB reach every client whole: in an answer and as a stream, on fast and slow links."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import queue
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from raftkv.pb import rpc_pb2
from raftkv.rpc import Channel
from tests.compat.ctl import Tool
from tests.compat.wire import Wire
from tests.foreign.environments import interpreter
from tests.foreign.sessions import environment
from tests.procs import RAFTKV, Cluster
from tests.relay import Pace, Relay
from tests.server.process.process import leader_of

STATUS, WATCH, RANGE_STREAM = (
    "etcdserverpb.Maintenance/Status",
    "/etcdserverpb.Watch/Watch",
    "/etcdserverpb.KV/RangeStream",
)
READERS = Path(__file__).resolve().parent / "readers"
TIMEOUT_S = 300
READER_PAUSE_S = 0.03
NAMES = ("etcdctl-3.4", "etcdctl-3.5", "etcd3", "aetcd", "etcd_client", "node")
KIB, MIB = 1024, 1024 * 1024


@dataclass(frozen=True)
class Size:
    """Keys that make one answer."""

    name: str
    values: int
    value_bytes: int

    @property
    def prefix(self) -> str:
        """Below it are these keys and no others."""
        return f"large/{self.name}/"

    def items(self) -> Iterator[tuple[str, bytes]]:
        """Keys and values; a value repeats its own name, so that no piece of it may be lost or doubled."""
        for number in range(self.values):
            word = f"{self.name}-{number:05d} ".encode()
            yield f"{self.prefix}{number:05d}", (word * (self.value_bytes // len(word) + 1))[: self.value_bytes]

    def digest(self) -> list[object]:
        """What a reader says that got them all."""
        return digest_of(value for _, value in self.items())


def digest_of(values: Iterable[bytes]) -> list[object]:
    """What a reader of these values says: how many, and the SHA-256 of all their bytes."""
    digest, count = hashlib.sha256(), 0
    for value in values:
        digest.update(value)
        count += 1
    return [count, digest.hexdigest()]


SIZES = (
    Size("100kB", 1, 100_000),
    Size("600kB", 1, 600_000),
    Size("1000x500B", 1000, 500),
    Size("3.5MB", 7, 500_000),
    Size("12MB", 12, MIB),
)
LARGEST = SIZES[-1:]

SLOW = Pace(32 * KIB, 0.005)
"""At most 6.5 MB/s, often less: hundreds of pings of Go's estimate go by during an answer."""
STUTTERING = Pace(5_000_000, 0.2)
"""Full speed, but the link stands still again and again."""


class Store:
    """A cluster that holds every size that was asked for so far."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._revisions: dict[Size, int] = {}

    @property
    def follower(self) -> str:
        """Endpoint of a member that does not lead, if there is one."""
        with Wire(self.cluster.endpoints) as wire:
            return self.cluster.endpoints[(leader_of(wire) + 1) % len(self.cluster.endpoints)]

    def start_of(self, size: Size) -> int:
        """The revision at which a size begins; writes it before it is first asked for."""
        if size not in self._revisions:
            with Wire(self.cluster.endpoints) as wire:
                self._revisions[size] = wire.call(STATUS, rpc_pb2.StatusRequest()).revision + 1
                _write(wire, size)
        return self._revisions[size]


def _write(wire: Wire, size: Size) -> None:
    """Put all keys, in txns of what fits into a request."""
    items = list(size.items())
    at_once = max(1, min(100, MIB // size.value_bytes))
    for start in range(0, len(items), at_once):
        puts = [rpc_pb2.PutRequest(key=key.encode(), value=value) for key, value in items[start : start + at_once]]
        txn = rpc_pb2.TxnRequest(success=[rpc_pb2.RequestOp(request_put=put) for put in puts])
        assert wire.call("etcdserverpb.KV/Txn", txn).code == "OK"


@pytest.fixture(scope="module")
def one() -> Iterator[Store]:
    with Cluster(RAFTKV) as cluster:
        yield Store(cluster)


@pytest.fixture(scope="module")
def three() -> Iterator[Store]:
    with Cluster(RAFTKV, size=3) as cluster:
        yield Store(cluster)


def _command(name: str) -> list[str]:
    if name.startswith("etcdctl"):
        tool = Tool.debian() if name == "etcdctl-3.4" else Tool.distro()
        return [sys.executable, str(READERS / "etcdctl_reader.py"), str(tool.path)]
    return [str(interpreter(name)), str(READERS / f"{name}_reader.{'js' if name == 'node' else 'py'}")]


def _takes(name: str, kind: str, size: Size) -> bool:
    """The client on tonic takes no message above 4 MiB, and writes itself what it watches: not a thousand keys."""
    if name != "etcd_client":
        return True
    return size.values * size.value_bytes < 4 * MIB if kind == "range" else size.values < 100


def _read(name: str, endpoint: str, store: Store, sizes: tuple[Size, ...]) -> None:
    """Let a client read ranges and watches of some sizes, and compare."""
    host, _, port = endpoint.rpartition(":")
    reads = [(kind, size) for size in sizes for kind in ("range", "watch") if _takes(name, kind, size)]
    wanted = [(kind, size.prefix, store.start_of(size), size.values) for kind, size in reads]
    asked = {"host": host, "port": int(port), "timeout_s": TIMEOUT_S, "reads": wanted}
    command = [*_command(name), json.dumps(asked)]
    done = subprocess.run(
        command, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S, check=False
    )
    read = [json.loads(line) for line in done.stdout.splitlines()]
    expected = [size.digest() for _, size in reads]
    assert (read, done.returncode) == (expected, 0), done.stderr.decode(errors="replace")[-3000:]


def _paced(messages: Iterable[bytes]) -> Iterator[bytes]:
    """Take messages as a program does that is slower than its link."""
    pause = threading.Event()
    for message in messages:
        yield message
        pause.wait(READER_PAUSE_S)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_client_reads_every_size(name: str, one: Store) -> None:
    _read(name, one.cluster.endpoints[0], one, SIZES)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_client_reads_every_size_from_a_follower_over_a_slow_link(name: str, three: Store) -> None:
    with Relay(three.follower, SLOW) as link:
        _read(name, link.endpoint, three, SIZES)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_client_reads_12_mb_over_a_link_that_stands_still_now_and_then(name: str, one: Store) -> None:
    with Relay(one.cluster.endpoints[0], STUTTERING) as link:
        _read(name, link.endpoint, one, LARGEST)


@pytest.mark.long
def test_a_slow_reader_on_grpcio_gets_every_chunk_and_event(one: Store) -> None:
    (size,) = LARGEST
    one.start_of(size)
    request = rpc_pb2.RangeRequest(key=size.prefix.encode(), range_end=size.prefix[:-1].encode() + b"0")
    with Wire(one.cluster.endpoints) as wire:
        chunks = wire.channel().unary_stream(RANGE_STREAM)(request.SerializeToString(), timeout=TIMEOUT_S)
        parts = [rpc_pb2.RangeStreamResponse.FromString(part) for part in _paced(chunks)]
        assert digest_of(kv.value for part in parts for kv in part.range_response.kvs) == size.digest()
        asked: queue.Queue[bytes] = queue.Queue()
        asked.put(_watch_request(one, size))
        responses = wire.channel().stream_stream(WATCH)(iter(asked.get, None), timeout=TIMEOUT_S)
        values = itertools.islice(_values(_paced(responses)), size.values)
        assert digest_of(values) == size.digest()
        responses.cancel()


@pytest.mark.long
async def test_a_slow_reader_on_our_own_channel_gets_every_chunk_and_event(one: Store) -> None:
    (size,) = LARGEST
    one.start_of(size)
    request = rpc_pb2.RangeRequest(key=size.prefix.encode(), range_end=size.prefix[:-1].encode() + b"0")

    async def taken(channel: Channel, path: str, message: bytes) -> AsyncIterator[bytes]:
        async with channel.stream(path, timeout_s=TIMEOUT_S) as call:
            await call.send(message)
            if path == RANGE_STREAM:
                call.half_close()
            async for part in call:
                yield part
                await asyncio.sleep(READER_PAUSE_S)

    async with Channel(one.cluster.endpoints[0]) as channel:
        parts = [part async for part in taken(channel, RANGE_STREAM, request.SerializeToString())]
        kvs = (kv for part in parts for kv in rpc_pb2.RangeStreamResponse.FromString(part).range_response.kvs)
        assert digest_of(kv.value for kv in kvs) == size.digest()
        values: list[bytes] = []
        async with contextlib.aclosing(taken(channel, WATCH, _watch_request(one, size))) as responses:
            async for response in responses:
                values.extend(_values([response]))
                if len(values) == size.values:
                    break
        assert digest_of(values) == size.digest()


def _watch_request(store: Store, size: Size) -> bytes:
    create = rpc_pb2.WatchCreateRequest(
        key=size.prefix.encode(), range_end=size.prefix[:-1].encode() + b"0", start_revision=store.start_of(size)
    )
    return bytes(rpc_pb2.WatchRequest(create_request=create).SerializeToString())


def _values(responses: Iterable[bytes]) -> Iterator[bytes]:
    for response in responses:
        for event in rpc_pb2.WatchResponse.FromString(response).events:
            yield event.kv.value
