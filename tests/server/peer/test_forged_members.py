"""A forged member sends invalid messages to live members, which continue or stop with one line."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from raftkv.pb import raft_pb2, rpc_pb2
from raftkv.pb.services import SERVICES
from raftkv.raft import confchange
from raftkv.raft.types import ConfChange, ConfChangeSingle, ConfChangeTransition, ConfChangeType, MessageType
from raftkv.replica.codec import MESSAGES_MAX, decode
from raftkv.rpc import Channel, RpcError
from raftkv.server.peer.transport import RAFT_PATH, peer_metadata
from tests.compat.wire import Wire
from tests.procs import RAFTKV, Cluster, Member, wait_for

SEED = 20_261_127
BATCHES = 24
NUMBERS = (0, 0, 1, 2, 7, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
SNAPSHOT_PATH = SERVICES["raftkvpb.Peer"]["InstallSnapshot"].path
ANSWER_S = 0.3
"""How long a stream is left open for what it brings: there is no answer."""


class Stage:
    """Two members, the ids of all three, and what was acknowledged."""

    def __init__(self, cluster: Cluster) -> None:
        self.members = cluster.members[:2]
        self.wire = Wire([member.endpoint for member in self.members])
        statuses = [self.wire.call("etcdserverpb.Maintenance/Status", b"", at).message for at in (0, 1)]
        self.cluster_id = statuses[0].header.cluster_id
        self.ids = [status.header.member_id for status in statuses]
        listed = self.wire.call("etcdserverpb.Cluster/MemberList", b"").message.members
        (self.own,) = {member.ID for member in listed} - set(self.ids)
        self.acknowledged: list[bytes] = []
        self.stopped: list[str] = []

    def write(self) -> None:
        """Have a write acknowledged by each, which may need a new leader."""
        for at in (0, 1):
            key = b"key %d" % len(self.acknowledged)
            put = rpc_pb2.PutRequest(key=key)
            wait_for(partial(self._is_written, put, at), "a write")
            self.acknowledged.append(key)

    def _is_written(self, put: rpc_pb2.PutRequest, at: int) -> bool:
        self._start_stopped()
        return self.wire.call("etcdserverpb.KV/Put", put, at).code == "OK"

    def status(self, at: int) -> Any:
        return self.wire.call("etcdserverpb.Maintenance/Status", b"", at).message

    def _start_stopped(self) -> None:
        """Start a member that stopped, if it said why."""
        for member in self.members:
            if member.exit_status is not None:
                last = member.log_path.read_text(encoding="utf-8").splitlines()[-1]
                assert (member.exit_status, last[:17]) == (1, "raftkv: stopped: "), member.log_tail()
                self.stopped.append(last)
                member.process = None
                member.restart()
                self.wire.reconnect()

    def check(self) -> None:
        """Both have everything, and the same."""
        self.write()
        hashes = set()
        for at in (0, 1):
            for key in self.acknowledged:
                answer = self.wire.call("etcdserverpb.KV/Range", rpc_pb2.RangeRequest(key=key), at)
                assert answer.message.count == 1, key
            revision = rpc_pb2.HashKVRequest(revision=answer.revision)
            hashes.add(self.wire.call("etcdserverpb.Maintenance/HashKV", revision, at).message.hash)
        assert len(hashes) == 1


@pytest.fixture
def stage() -> Iterator[Stage]:
    cluster = Cluster(RAFTKV, size=3)
    with contextlib.closing(cluster):
        for member in cluster.members[:2]:
            member.start()
        for member in cluster.members[:2]:
            member.wait_ready()
        found = Stage(cluster)
        with found.wire:
            found.write()
            yield found


@contextlib.asynccontextmanager
async def stream(stage: Stage, at: int, path: str) -> AsyncIterator[Any]:
    """A stream of the third member, until it ends in any way."""
    member: Member = stage.members[at]
    async with Channel(f"127.0.0.1:{member.peer_port}") as channel:
        call = channel.stream(path, metadata=peer_metadata(stage.cluster_id, stage.own, stage.ids[at]))
        with contextlib.suppress(RpcError, TimeoutError):
            yield call
            async with asyncio.timeout(ANSWER_S):
                await call.receive()
        call.cancel()


def send(stage: Stage, at: int, *batches: bytes) -> None:
    """Send batches as the third member, on a stream of their own."""

    async def scenario() -> None:
        async with stream(stage, at, RAFT_PATH) as call:
            await call.receive()
            for batch in batches:
                await call.send(batch)
            call.half_close()

    asyncio.run(scenario())


def forged(draw: random.Random, stage: Stage, at: int) -> raft_pb2.Message:
    """A message of any kind, often of the present term, with numbers of which each may be anything."""
    status = stage.status(at)
    near = (status.raftIndex, status.raftIndex + 1, status.raftTerm)

    def number() -> int:
        return draw.choice((*NUMBERS, *near))

    message = raft_pb2.Message(
        type=draw.choice((*MessageType,) * 4 + (20, 2**32 - 1)),
        to_id=stage.ids[at],
        from_id=draw.choice((stage.own,) * 60 + (0, 1, stage.ids[1 - at])),
        term=draw.choice((status.raftTerm, status.raftTerm, status.raftTerm + 1, number())),
        log_term=number(),
        index=number(),
        commit=number(),
        reject=draw.random() < 0.5,
        reject_hint=number(),
        context=draw.choice((b"", b"CampaignTransfer", b"x" * 8, bytes(100_000))),
        quiet=draw.random() < 0.5,
    )
    for _ in range(draw.choice((0, 1, 1, 1, 1, 2))):
        datas = [draw.choice((b"", b"\x01", bytes(9), b"\xff" * 30, changed(draw, stage)))] * draw.choice((1, 1, 5))
        first = draw.choice((message.index + 1,) * 8 + (0, number())) % 2**64
        term, kind = draw.choice((message.term, message.term, number())), draw.choice((0, 1, 2) * 10 + (3, 2**32 - 1))
        message.runs.add(term=term, first_index=first, type=kind, datas=datas)
    if draw.random() < 0.1:
        message.snapshot.index, message.snapshot.term = number(), number()
    return message


def changed(draw: random.Random, stage: Stage) -> bytes:
    """A change of members without a request."""
    ids = (0, stage.own, *stage.ids, 2**64 - 1)
    steps = [ConfChangeSingle(draw.choice(list(ConfChangeType)), draw.choice(ids)) for _ in range(draw.choice((1, 3)))]
    transition = draw.choice(list(ConfChangeTransition))
    return confchange.encode(ConfChange(tuple(steps), transition, draw.choice((b"", b"\xff" * 9))))


@pytest.mark.long
def test_raft_messages(stage: Stage) -> None:
    draw, taken = random.Random(SEED), 0
    for number in range(BATCHES):
        at = number % 2
        messages = [forged(draw, stage, at) for _ in range(draw.choice((1, 1, 3, 10)))]
        if number % 10 == 9:
            messages = messages[:1] * (MESSAGES_MAX // 2)
        batch = raft_pb2.MessageBatch(messages=messages).SerializeToString()
        with contextlib.suppress(DecodeError, KeyError, IndexError):
            taken += len(decode(batch)) > 0
        send(stage, at, batch)
        stage.write()
    stage.check()
    print(f"{taken} of {BATCHES} batches were read; stops:", *stage.stopped, sep="\n")
    assert taken > BATCHES // 2


@pytest.mark.long
def test_streams_of_databases(stage: Stage) -> None:
    draw = random.Random(SEED)
    for number in range(BATCHES // 2):
        at = number % 2
        status = stage.status(at)
        message = forged(draw, stage, at)
        message.type, message.from_id = MessageType.SNAPSHOT, stage.own
        message.snapshot.index = draw.choice((status.raftIndex + 9, *NUMBERS))
        message.snapshot.conf_state.voters[:] = stage.ids * draw.choice((0, 1, 2))
        size, digest = draw.choice((10, 10, *NUMBERS)), draw.choice((b"", b"d" * 32, b"d" * 300, b"/../x"))
        head = raft_pb2.SnapshotChunk(
            message=message, size_bytes=size, sha256=digest, offset_bytes=draw.choice(NUMBERS)
        )
        pieces = [head, *[raft_pb2.SnapshotChunk(data=b"x" * draw.choice((0, 1, 10, 2**20))) for _ in range(3)]]
        pieces.append(raft_pb2.SnapshotChunk(sha256=draw.choice((b"d" * 32, b"d"))))
        draw.shuffle(pieces)

        async def scenario(at: int = at, pieces: list[Any] = pieces) -> None:
            async with stream(stage, at, SNAPSHOT_PATH) as call:
                for piece in pieces:
                    await call.send(piece.SerializeToString())
                call.half_close()

        asyncio.run(scenario())
        stage.write()
    stage.check()
    assert stage.stopped == []
