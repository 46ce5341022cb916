"""The differential test of streams must be able to fail: planted lies on one side are seen and named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raftkv.pb import election_pb2, rpc_pb2
from tests.compat.differential.stream_generator import At
from tests.compat.differential.stream_programs import Op, Player
from tests.compat.streams import Stream, Streams
from tests.compat.wire import Wire
from tests.procs import ETCD_FAST, Cluster

Lie = Callable[[Any], Iterator[Any]]


@pytest.fixture(scope="module")
def twins() -> Iterator[tuple[Wire, Wire]]:
    """Two clusters of etcd."""
    with Cluster(ETCD_FAST) as one, Cluster(ETCD_FAST) as other, Wire(one.endpoints) as a, Wire(other.endpoints) as b:
        yield a, b


PROGRAM = [
    Op("lease", rpc_pb2.LeaseGrantRequest(ID=10, TTL=100)),
    Op("watch", rpc_pb2.WatchCreateRequest(key=b"\0", range_end=b"\0")),
    Op("campaign", election_pb2.CampaignRequest(name=b"n", lease=10, value=b"1")),
    Op("observe", election_pb2.LeaderRequest(name=b"n")),
    Op("kv", rpc_pb2.TxnRequest(success=[rpc_pb2.RequestOp(request_put={"key": key}) for key in (b"a", b"b")])),
    Op("leader", election_pb2.ProclaimRequest(leader={"name": b"n", "key": b"n/a", "lease": 10}, value=b"2")),
    Op("progress", rpc_pb2.WatchProgressRequest()),
    Op("kv", rpc_pb2.CompactionRequest(), at=At("now", 0)),
    Op("watch", rpc_pb2.WatchCreateRequest(key=b"a"), at=At("compacted", -1)),
    Op("cancel", rpc_pb2.WatchCancelRequest()),
]


def _changed(**fields: Any) -> Lie:
    def lie(message: Any) -> Iterator[Any]:
        for name, value in fields.items():
            if getattr(message, name, None):
                setattr(message, name, value)
        yield message

    return lie


def _without_second_leader(message: Any) -> Iterator[Any]:
    if not (isinstance(message, election_pb2.LeaderResponse) and message.kv.value == b"2"):
        yield message


def _in_two(message: Any) -> Iterator[Any]:
    """A revision over two responses."""
    if isinstance(message, rpc_pb2.WatchResponse) and len(message.events) == 2:
        for event in message.events:
            part = rpc_pb2.WatchResponse(header=message.header, watch_id=message.watch_id)
            part.events.append(event)
            yield part
    else:
        yield message


def _reversed(message: Any) -> Iterator[Any]:
    if isinstance(message, rpc_pb2.WatchResponse):
        events = list(message.events)[::-1]
        del message.events[:]
        message.events.extend(events)
    yield message


def _early_progress(message: Any) -> Iterator[Any]:
    if isinstance(message, rpc_pb2.WatchResponse) and message.watch_id == -1:
        message.header.revision += 1
    yield message


def _twice(message: Any) -> Iterator[Any]:
    yield message
    if isinstance(message, rpc_pb2.WatchResponse) and len(message.events) == 2:
        yield message


LIES: dict[str, tuple[Lie, str]] = {
    "an observer misses a leader": (_without_second_leader, "in vain for the streams of b"),
    "a revision in two responses": (_in_two, "events of the watcher"),
    "events out of order": (_reversed, "events of the watcher"),
    "another compact revision": (_changed(compact_revision=1), "events of the watcher"),
    "progress before its time": (_early_progress, "control messages"),
    "an event twice": (_twice, "events of the watcher"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", LIES)
def test_lies_are_seen(twins: tuple[Wire, Wire], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lie, expected = LIES[name]
    player = Player(*twins, seed=1)
    assert player._play(PROGRAM) is None
    honest = Streams.open

    def open_lying(streams: Streams, method: str, *arguments: Any) -> Stream:
        stream = honest(streams, method, *arguments)
        if streams is player.sides[1].streams and len(player.sides[1].sessions) + player.report.kinds["observe"] > 0:
            stream.messages = _Lies(lie)
        return stream

    monkeypatch.setattr(Streams, "open", open_lying)
    monkeypatch.setattr("tests.compat.streams.WAIT_MAX_S", 0.5)
    failed = player._play(PROGRAM)
    assert failed is not None
    assert expected in failed[1]


class _Lies(list[Any]):
    """Messages that a lie has passed through."""

    def __init__(self, lie: Lie) -> None:
        super().__init__()
        self._lie = lie

    def append(self, message: Any) -> None:
        """Take what the lie makes of a message."""
        self.extend(self._lie(message))
