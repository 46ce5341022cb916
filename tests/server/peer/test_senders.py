"""A peer stream carries messages of one sender only: a message in another's name ends it with a log line."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from raftkv.pb import rpc_pb2
from raftkv.pb.services import SERVICES
from raftkv.raft.types import Message, MessageType, SnapshotMeta
from raftkv.replica.codec import BatchEncoder
from raftkv.replica.membership.versions import UNKNOWN_PEERS_MAX
from raftkv.replica.snapshots.files import PEERS_MAX, Transfers
from raftkv.rpc.client.channel import Channel
from raftkv.rpc.client.stream import ClientStream
from raftkv.rpc.status import Code
from raftkv.server.peer import service as service_module
from raftkv.server.peer.transport import RAFT_PATH, peer_metadata
from tests.rpc.loop import failure, until
from tests.server.peer.test_members_at_run_time import ASKED, ASKED_BY_MEMBERS, CLUSTER, OTHER, OWN, Receiver

THIRD = 3
VOTE = Message(MessageType.VOTE_RESPONSE, to=OTHER, from_=OWN, term=7)


class Asked(Receiver):
    channel: Channel

    async def stream(self, sender: int = OWN) -> ClientStream:
        stream = self.channel.stream(RAFT_PATH, metadata=peer_metadata(CLUSTER, sender, OTHER))
        assert await stream.receive() == b""
        return stream


@pytest.fixture
@asynccontextmanager
async def receiver() -> AsyncIterator[Asked]:
    made = Asked()
    made.members.members[THIRD] = rpc_pb2.Member(ID=THIRD)
    async with Channel((await made.listen()).removeprefix("http://")) as made.channel:
        yield made
    await made.server.close(0.0)


def _batch(*messages: Message) -> bytes:
    return b"".join(BatchEncoder().batches(messages))


@pytest.mark.parametrize(
    ("forged", "text"),
    [
        (Message(MessageType.VOTE_RESPONSE, to=OTHER, from_=THIRD, term=7), "VOTE_RESPONSE from 3 to 2"),
        (Message(MessageType.APPEND, to=OTHER, from_=THIRD, term=7), "APPEND from 3 to 2"),
        (Message(MessageType.HEARTBEAT, to=OTHER, from_=0, term=7), "HEARTBEAT from 0 to 2"),
        (Message(MessageType.HEARTBEAT, to=THIRD, from_=OWN, term=7), "HEARTBEAT from 1 to 3"),
        (Message(MessageType.PROPOSE, to=OTHER, from_=9), "PROPOSE from 9 to 2"),
        (
            Message(MessageType.SNAPSHOT, to=OTHER, from_=OWN, term=7, snapshot=SnapshotMeta(9, 7)),
            "SNAPSHOT from 1 to 2",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_message_in_another_name_or_without_its_database_ends_the_stream(receiver, caplog, forged, text):
    stream = await receiver.stream()
    await stream.send(_batch(VOTE, forged))
    error = await failure(stream.receive())
    assert error.code is Code.INVALID_ARGUMENT
    assert error.text == f"raftkv: the stream of member 1 brought a message {text}"
    assert receiver.received == [], "nothing of the batch is taken"
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line.endswith(text)


async def test_forwarded_messages_are_taken(receiver: Asked) -> None:
    stream = await receiver.stream()
    kinds = (MessageType.PROPOSE, MessageType.READ_INDEX, MessageType.TRANSFER_LEADER)
    await stream.send(_batch(VOTE, *(Message(kind, to=OTHER, from_=THIRD) for kind in kinds)))
    async with asyncio.timeout(90):
        await until(lambda: len(receiver.received) == 4)


async def test_two_processes_of_one_member_are_logged(receiver, caplog, monkeypatch):
    """A stream that is soon silent after the next one began is what a restart leaves: only one that goes on counts."""
    monkeypatch.setattr(service_module, "TWINS_S", 0.2)
    first = await receiver.stream()
    await first.send(_batch(VOTE))
    second = await receiver.stream()
    await first.send(_batch(VOTE))
    await second.send(_batch(VOTE))
    async with asyncio.timeout(90):
        await until(lambda: len(receiver.received) == 3)
        third = await receiver.stream()
        while not any("two processes run as member 1," in line for line in caplog.messages):
            await second.send(_batch(VOTE))
            await third.send(_batch(VOTE))
            await asyncio.sleep(0.02)
    (line,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "stop the one at an address" in line.getMessage()


STRANGER = 77


async def test_an_unknown_peer_passes_nothing_on(receiver: Asked) -> None:
    """Let an unknown peer lead and vote, as it may be a new member, and cause no entries."""
    stream = await receiver.stream(STRANGER)
    kinds = (MessageType.PROPOSE, MessageType.READ_INDEX, MessageType.TRANSFER_LEADER, MessageType.HEARTBEAT)
    await stream.send(_batch(*(Message(kind, to=OTHER, from_=STRANGER) for kind in kinds)))
    async with asyncio.timeout(90):
        await until(lambda: bool(receiver.received))
    assert [message.type for message in receiver.received] == [MessageType.HEARTBEAT]
    receiver.members.members[STRANGER] = rpc_pb2.Member(ID=STRANGER)
    await stream.send(_batch(*(Message(kind, to=OTHER, from_=STRANGER) for kind in kinds)))
    async with asyncio.timeout(90):
        await until(lambda: len(receiver.received) == 5)


async def test_unknown_peer_may_only_make_catch_up_calls(receiver: Asked) -> None:
    for name in ASKED:
        path = SERVICES["raftkvpb.Peer"][name].path
        assert await receiver.channel.unary(path, b"", 5.0, peer_metadata(CLUSTER, OWN, OTHER)) == b"done"
        asked = receiver.channel.unary(path, b"", 5.0, peer_metadata(CLUSTER, STRANGER, OTHER))
        if name in ASKED_BY_MEMBERS:
            error = await failure(asked)
            assert (error.code, error.text) == (Code.UNAVAILABLE, "raftkv: member 4d is not known here yet"), name
        else:
            assert await asked == b"done"


async def test_memory_of_unknown_peers_is_bounded(receiver: Asked) -> None:
    """On a port without TLS any caller may claim to be a member that is not known here yet."""
    forged = _batch(Message(MessageType.HEARTBEAT, to=OTHER, from_=0, term=7))
    for stranger in (OWN, *range(1000, 1000 + 3 * UNKNOWN_PEERS_MAX)):
        async with await receiver.stream(stranger) as stream:
            await stream.send(forged)
            await failure(stream.receive())
    service = receiver.service
    for kept in (service.received_bytes, service.received_failures, receiver.versions._heard):
        assert OWN in kept
        assert UNKNOWN_PEERS_MAX <= len(kept) <= UNKNOWN_PEERS_MAX + 2


def test_transfers_of_many_ids_are_not_all_counted() -> None:
    transfers = Transfers()
    with transfers.of(1):
        for stranger in range(2, 3 * PEERS_MAX):
            with transfers.of(stranger):
                assert transfers.under_way[1] == 1
    for kept in (transfers.under_way, transfers.succeeded, transfers.failed, transfers.durations):
        assert len(kept) <= PEERS_MAX
    assert transfers.succeeded[1] == 1
