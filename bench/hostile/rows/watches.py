"""Watches: very many on a stream, and very much history."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from time import monotonic

from bench.hostile.attacker import EVERYTHING, KV, Attacker
from bench.hostile.rows.row import Row
from bench.hostile.users import permission, user_of
from raftkv.pb import rpc_pb2
from raftkv.rpc.client.stream import ClientStream
from raftkv.rpc.status import RpcError

_WATCH = "/etcdserverpb.Watch/Watch"
_ANSWER_TIMEOUT_S = 60.0


async def _read(stream: ClientStream, responses: int, attacker: Attacker) -> None:
    """Read so many answers, or to the end of the stream."""
    try:
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            for _ in range(responses):
                message = await stream.receive()
                if message is None:
                    return
                if len(message) < 1000 and (response := rpc_pb2.WatchResponse.FromString(message)).canceled:
                    attacker.refused(response.cancel_reason)
    except TimeoutError:
        attacker.refused("no answer on the watch stream in time")


async def _watchers_then_progress(attacker: Attacker) -> None:
    """Creating them is a part of the attack."""
    watchers = attacker.count(200_000, 100)
    async with attacker.stream(_WATCH) as stream:
        reading = asyncio.create_task(_read(stream, watchers, attacker))
        for number in range(watchers):
            create = rpc_pb2.WatchCreateRequest(key=b"w%d" % number)
            await stream.send(rpc_pb2.WatchRequest(create_request=create).SerializeToString())
            if number % 1000 == 0:
                await asyncio.sleep(0)
        await reading
        progress = rpc_pb2.WatchRequest(progress_request=rpc_pb2.WatchProgressRequest()).SerializeToString()
        reading = asyncio.create_task(_read(stream, attacker.count(500, 5), attacker))
        for _ in range(attacker.count(500, 5)):
            await stream.send(progress)
        await asyncio.wait_for(reading, _ANSWER_TIMEOUT_S)


async def _fill_history(attacker: Attacker) -> None:
    for round_number in range(2):
        await attacker.fill(attacker.count(100_000, 100), b"history/", b"%d" % round_number * 64)


async def _replay(attacker: Attacker) -> None:
    """Ten connections of ten streams, each from revision 1, all read as fast as they come."""
    channels = [attacker.channel() for _ in range(10)]

    async def replay(number: int) -> None:
        try:
            async with channels[number % 10].stream(_WATCH) as stream:
                create = rpc_pb2.WatchCreateRequest(key=EVERYTHING, range_end=EVERYTHING, start_revision=1)
                await stream.send(rpc_pb2.WatchRequest(create_request=create).SerializeToString())
                while not attacker.is_over():
                    message = await asyncio.wait_for(stream.receive(), _ANSWER_TIMEOUT_S)
                    if message is None:
                        return
        except RpcError as error:
            attacker.refused(str(error))
        except TimeoutError:
            attacker.refused("no event of the history in time")

    await asyncio.gather(*[replay(number) for number in range(100)])


async def _unread(attacker: Attacker) -> None:
    """A thousand watchers of one key that is written, by clients which read nothing."""
    channels, puts = [attacker.channel() for _ in range(10)], attacker.channel()
    create = rpc_pb2.WatchCreateRequest(key=b"unread", prev_kv=True)
    message = rpc_pb2.WatchRequest(create_request=create).SerializeToString()
    streams = [channels[number % 10].stream(_WATCH) for number in range(attacker.count(1000, 10))]
    try:
        for stream in streams:
            await stream.send(message)
        while not attacker.is_over():
            await attacker.call(KV + "Put", rpc_pb2.PutRequest(key=b"unread", value=b"v" * 100_000), puts)
    except RpcError as error:
        attacker.refused(str(error))
    finally:
        for stream in streams:
            stream.cancel()


async def _fill_300k(attacker: Attacker) -> None:
    await attacker.fill(attacker.count(300_000, 100))


async def _delete_watched(attacker: Attacker) -> None:
    """Ten watchers of all that is deleted, half of them with previous values; all is read."""
    channels = [attacker.channel() for _ in range(5)]
    async with AsyncExitStack() as stack:
        reading = []
        for number in range(10):
            stream = await stack.enter_async_context(channels[number % 5].stream(_WATCH))
            create = rpc_pb2.WatchCreateRequest(key=b"fill/", range_end=b"fill0", prev_kv=number % 2 == 0)
            await stream.send(rpc_pb2.WatchRequest(create_request=create).SerializeToString())
            await _read(stream, 1, attacker)
            reading.append(asyncio.create_task(_read(stream, 1, attacker)))
        request = rpc_pb2.DeleteRangeRequest(key=b"fill/", range_end=b"fill0")
        await attacker.call(KV + "DeleteRange", request)
        await asyncio.gather(*reading)


async def _mallory(attacker: Attacker) -> None:
    attacker.user_token = await user_of(attacker, "mallory", permission(b"mallory/", b"mallory0"))


async def _all_watchers(attacker: Attacker) -> None:
    """Watches of one user on long keys of its own, as many as are taken; then others watch one key."""
    theirs, others = attacker.channel(token=attacker.user_token), attacker.channel()
    create = rpc_pb2.WatchRequest(create_request=rpc_pb2.WatchCreateRequest(key=b"mallory/" + b"k" * 1_400_000))
    message = create.SerializeToString()

    async def take() -> None:
        stream, count = theirs.stream(_WATCH), attacker.count(180, 5)
        streams.append(stream)
        reading = asyncio.create_task(_read(stream, count, attacker))
        for _ in range(count):
            await stream.send(message)
        await reading

    async def watch() -> bool:
        create = rpc_pb2.WatchCreateRequest(key=b"others")
        with suppress(RpcError, TimeoutError):
            async with asyncio.timeout(5), others.stream(_WATCH) as stream:
                await stream.send(rpc_pb2.WatchRequest(create_request=create).SerializeToString())
                found = await stream.receive()
                return found is not None and not rpc_pb2.WatchResponse.FromString(found).canceled
        return False

    streams: list[ClientStream] = []
    began = monotonic()
    await asyncio.gather(*[take() for _ in range(5)])
    attacker.until += monotonic() - began
    await attacker.others(watch)
    for stream in streams:
        stream.cancel()


ROWS = (
    Row("share-watchers", "one user's 900 watches on keys of 1.4 MB, while others watch", _all_watchers, _mallory,
        False, users=True),
    Row(
        "watch-progress",
        "500 progress requests on a stream with 200,000 watchers",
        _watchers_then_progress,
        repeats=False,
    ),
    Row("watch-history", "100 watches of everything from revision 1 over 200,000 events", _replay, _fill_history),
    Row(
        "delete-300k-watched",
        "delete of 300,000 keys in one entry, which 10 watch, half with previous values",
        _delete_watched,
        _fill_300k,
        repeats=False,
    ),
    Row("watch-unread", "1,000 watchers of a key of 100 kB that is written, nothing is read", _unread),
)  # fmt: skip
