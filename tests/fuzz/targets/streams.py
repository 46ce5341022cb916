"""Streams of a client: watch requests and keep-alives, message after message, on the real state behind them."""

from __future__ import annotations

import gzip
import itertools
import struct
from collections.abc import Callable
from typing import cast

from raftkv import errors
from raftkv.apply.wire import HeaderEncoder
from raftkv.loop.cork import Cork
from raftkv.pb import rpc_pb2
from raftkv.replica.watch.hub import WatchHub
from raftkv.replica.watch.stream import WatchStream
from raftkv.rpc.framing import PREFIX, MessageAssembler, PackedAssembler, frame
from raftkv.rpc.server.stream import ListenedCall
from raftkv.rpc.status import RpcError
from raftkv.server.streams.lease import KeepAliveStream, LeaseService
from raftkv.storage.mvcc import Store
from tests.fuzz.target import Target
from tests.replica.lease.test_keep_alives import Call, Service
from tests.replica.watch.fakes import FakeCall
from tests.storage.memory import MemoryBackend

Create, Cancel, Progress = rpc_pb2.WatchCreateRequest, rpc_pb2.WatchCancelRequest, rpc_pb2.WatchProgressRequest
REFUSED = (errors.StatusError, RpcError)


def _messages(data: bytes) -> list[bytes]:
    return MessageAssembler(1 << 16).feed(data)


def _watched(data: bytes) -> None:
    """Input: framed WatchRequests; then changes, which every watcher that is left gets in order."""
    store = Store.open(MemoryBackend())
    header = HeaderEncoder(1, 2)
    cork = Cork(lambda flush: None)
    hub = WatchHub(store, lambda revision: header.encode(revision, 1), lambda: None, cork)
    store.on_changes = hub.changed
    call = FakeCall()
    stream = WatchStream(hub, call, 400, lambda error: None, identity="address 10.0.0.1")
    _change(store, hub, cork)
    for message in _messages(data)[:50]:
        stream.receive(message)
    _change(store, hub, cork)
    cork.flush()
    responses = call.read()
    revisions: dict[int, int] = {}
    for response in responses:
        for event in response.events:
            assert event.kv.mod_revision >= revisions.get(response.watch_id, 0)
            revisions[response.watch_id] = event.kv.mod_revision
    stream.close()
    hub.leave(stream)
    assert hub.shares.used == 0


def _change(store: Store, hub: WatchHub, cork: Cork) -> None:
    for key in (b"a", b"b", b"k"):
        txn = store.begin()
        txn.put(key, b"v")
        txn.end()
    hub.applied()
    cork.flush()


def _watches() -> list[bytes]:
    requests = [
        rpc_pb2.WatchRequest(create_request=Create(key=b"a")),
        rpc_pb2.WatchRequest(
            create_request=Create(
                key=b"a",
                range_end=b"\0",
                start_revision=2,
                prev_kv=True,
                progress_notify=True,
                fragment=True,
                watch_id=7,
            )
        ),
        rpc_pb2.WatchRequest(create_request=Create(range_end=b"\0", start_revision=9, filters=[0, 1])),
        rpc_pb2.WatchRequest(progress_request=Progress()),
        rpc_pb2.WatchRequest(cancel_request=Cancel(watch_id=7)),
    ]
    framed = [frame(request.SerializeToString()) for request in requests]
    return [*framed, b"".join(framed)]


class _Leases(Service):
    """Reads requests as the service does."""

    def parse_keep_alive(self, data: bytes) -> tuple[int, bytes, int]:
        return LeaseService.parse_keep_alive(cast(LeaseService, self), data)


def _kept(data: bytes) -> None:
    """Input: framed LeaseKeepAliveRequests; each that is taken is answered once."""
    service, call = _Leases(), Call()
    stream = KeepAliveStream(service, cast(ListenedCall, call))
    taken = 0
    for message in _messages(data)[:100]:
        stream.receive(message)
        taken += 1
    for pending in service.kept_waiting:
        pending.answer(0)
    assert service.waiting.used == 0
    for flush in service.scheduled:
        flush()
    assert sum(map(len, call.writes)) == taken


def _keep_alives() -> list[bytes]:
    ids = (1, 7, -5, 2**62, 1)
    return [b"".join(frame(rpc_pb2.LeaseKeepAliveRequest(ID=one).SerializeToString()) for one in ids)]


def _assembled(data: bytes) -> None:
    """Input: where to cut (2 bytes each, 3 of them), then framed messages: cut or whole, the same comes of it."""
    _cut_or_whole(data, lambda: MessageAssembler(1000))


def _unpacked(data: bytes) -> None:
    """Input: the same, of which some are compressed."""
    _cut_or_whole(data, lambda: PackedAssembler(1000))


def _cut_or_whole(data: bytes, make: Callable[[], MessageAssembler]) -> None:
    cuts = sorted(at % max(1, len(data) - 6) for (at,) in struct.iter_unpack(">H", data[:6].ljust(6, b"\0")))
    stream = data[6:]
    ends = [0, *cuts, len(stream)]
    found = []
    for pieces in ([stream], [stream[start:end] for start, end in itertools.pairwise(ends)]):
        assembler, messages, error = make(), [], ""
        try:
            for piece in pieces:
                messages += assembler.feed(piece)
                while assembler.is_busy:
                    messages += assembler.feed(b"")
        except RpcError as refusal:
            error = str(refusal)
        found.append((error, messages if not error else None))
    assert found[0] == found[1]
    if found[0][0]:
        raise RpcError(errors.INTERNAL, found[0][0])


def _compressed() -> list[bytes]:
    packed = [gzip.compress(one, level, mtime=0) for one, level in ((b"", 9), (b"hello" * 50, 9), (b"plain", 0))]
    framed = b"".join(PREFIX.pack(1, len(one)) + one for one in packed)
    both = PREFIX.pack(1, len(packed[1] + packed[2])) + packed[1] + packed[2]
    return [b"\0\1\0\7\0\3" + framed + frame(b"plain"), b"\0\1\0\7\0\3" + both]


DECODED = (*REFUSED,)
TARGETS = (
    Target("watch-stream", lambda directory: _watched, _watches, DECODED, examples=60),
    Target("keep-alive-stream", lambda directory: _kept, _keep_alives, DECODED, examples=60),
    Target(
        "framing",
        lambda directory: _assembled,
        lambda: [b"\0\1\0\7\0\3" + frame(b"hello") + frame(b"") + frame(b"x" * 200)],
        (RpcError,),
        tokens=(b"\0\0\0\0\0", b"\1\0\0\0\1", b"\0\xff\xff\xff\xff"),
    ),
    Target(
        "packed-framing",
        lambda directory: _unpacked,
        _compressed,
        (RpcError,),
        tokens=(b"\1\0\0\0\1", b"\x1f\x8b\x08", b"\0\0\xff\xff", bytes(8)),
    ),
)
