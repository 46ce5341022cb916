"""A client that observes an election: every leader and proclamation sent by a member, recorded like a watch.

Each stream to a member is a ``watches.Stream`` named ``observe/<election>``; each answer is an event in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Sequence

import grpc
import grpc.aio

from jepsen.checkers.lock import OBSERVED
from jepsen.client import open_channel
from jepsen.db import Member
from jepsen.history import Recorder
from jepsen.ops import Leader
from jepsen.special_wire import METHODS
from jepsen.watcher import Ending
from jepsen.watches import Event, Message, Stream, Watched
from jepsen.wire import key_values
from raftkv.pb import election_pb2

OBSERVE = "/v3electionpb.Election/Observe"
_LIVES_S = (1.0, 8.0)
_RECONNECT_S = 0.1


async def observe(name: str, members: Sequence[Member], recorder: Recorder, rng: random.Random, ending: Ending) -> None:
    """Observe an election on one member after the other until the run ends.

    Arguments:
        name: name of the election.
        members: members to ask, in turn.
        recorder: recorder of the streams.
        rng: decides the length of each stream.
        ending: end of the run.
    """
    attempt = 0
    while not ending.over.is_set():
        member = members[attempt % len(members)]
        stream = Stream(OBSERVED + name, attempt, member.number, Watched(name + "/", name + "0"), time.monotonic_ns())
        stream.lives = (member.lives, member.lives)
        recorder.streams.append(stream)
        with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):
            await asyncio.wait_for(_read(name, member, stream), rng.uniform(*_LIVES_S))
        stream.ended, stream.lives = time.monotonic_ns(), (stream.lives[0], member.lives)
        attempt += 1
        await asyncio.sleep(_RECONNECT_S)


async def _read(name: str, member: Member, stream: Stream) -> None:
    channel = open_channel(member.address)
    try:
        call = channel.unary_stream(
            OBSERVE,
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=METHODS[Leader][1].FromString,
        )(election_pb2.LeaderRequest(name=name.encode()))
        async for response in call:
            events = tuple(Event("put", kv) for kv in key_values([response.kv]))
            stream.messages.append(Message(time.monotonic_ns(), "events", response.header.revision, events))
    finally:
        await channel.close()
