"""Watches on real servers: order, atomicity, slow readers, compaction, and member deaths."""

from __future__ import annotations

import asyncio
import gc

import pytest

from raftkv.aio import Compacted, StatusError, WatchCanceled, connect, delete, put
from tests.client.waiting import until
from tests.procs import ETCD_FAST, RAFTKV, Cluster


async def take(watch, count):
    return [await anext(watch) for _ in range(count)]


async def test_events(kv):
    async with kv.watch("k", prefix=True, prev_kv=True) as watch:
        created = await kv.put("k1", "a")
        await kv.put("k1", "b")
        await kv.put("other", "x")
        deleted = await kv.delete("k1")
        first, second, third = await take(watch, 3)
    assert (first.type, first.key, first.value, first.is_create, first.prev_kv) == ("PUT", b"k1", b"a", True, None)
    assert first.revision == created.revision
    assert (second.is_create, second.prev_kv.value, second.prev_kv.key) == (False, b"a", b"k1")
    assert (third.type, third.value, third.prev_kv.value) == ("DELETE", b"", b"b")
    assert third.revision == deleted.revision == watch.revision


async def test_a_revision_is_never_split(kv):
    async with kv.watch("t/", prefix=True) as watch:
        await kv.txn().then(put("t/1", "a"), put("t/2", "b"), delete("t/3")).commit()
        batch = await watch.next_batch()
        assert [(event.type, event.key) for event in batch] == [("PUT", b"t/1"), ("PUT", b"t/2")]
        assert len({event.revision for event in batch}) == 1


async def test_replay_and_filters(kv):
    first = await kv.put("k", "1")
    await kv.put("k", "2")
    await kv.delete("k")
    assert [event.value for event in await take(kv.watch("k", start_revision=first.revision), 3)] == [b"1", b"2", b""]
    deletes = kv.watch("k", start_revision=first.revision, no_put=True)
    assert [event.type for event in await take(deletes, 1)] == ["DELETE"]
    puts = kv.watch("k", start_revision=first.revision, no_delete=True)
    await kv.put("k", "3")
    assert [event.value for event in await take(puts, 3)] == [b"1", b"2", b"3"]


async def test_values_and_large_values_are_left_out_on_request(kv):
    """Members of raftkv do not send them; etcd does, and the client leaves them out."""
    first = await kv.put("k", "small")
    await kv.put("k", "large" * 10)
    await kv.put("k", "after")
    late = await take(kv.watch("k", start_revision=first.revision, keys_only=True, prev_kv=True), 3)
    assert [(event.value, event.kv.version) for event in late] == [(b"", 1), (b"", 2), (b"", 3)]
    assert [event.prev_kv and event.prev_kv.value for event in late] == [None, b"", b""]
    small = kv.watch("k", start_revision=first.revision, max_value_bytes=5)
    both = kv.watch("k", keys_only=True, max_value_bytes=5)
    await both.ready()
    await kv.put("k", "larger")
    await kv.delete("k")
    assert [event.value for event in await take(small, 3)] == [b"small", b"after", b""]
    assert [event.type for event in await take(both, 1)] == ["DELETE"]


async def test_many_watches_share_a_stream(kv):
    watches = [kv.watch(f"k{number}") for number in range(200)]
    await asyncio.gather(*(watch.ready() for watch in watches))
    await kv.put_many((f"k{number}", str(number)) for number in range(200))
    events = await asyncio.gather(*(anext(watch) for watch in watches))
    assert [event.value for event in events] == [b"%d" % number for number in range(200)]


async def test_a_watch_ends_with_its_reader(kv):
    async with kv.watch("k") as watch:
        reader = asyncio.ensure_future(anext(watch, None))
        await asyncio.sleep(0)
        watch.cancel()
        assert await reader is None
        assert await watch.next_batch() == []
    put = await kv.put("k", "1")
    async for event in kv.watch("k", start_revision=put.revision):
        assert event.value == b"1"
        break
    gc.collect()
    await asyncio.sleep(0)
    assert not kv.scope.hub.watchers


async def test_compacted_from_the_start(kv):
    first = await kv.put("k", "1")
    last = await kv.put("k", "2")
    await kv.compact(last.revision)
    with pytest.raises(Compacted) as raised:
        await anext(kv.watch("k", start_revision=first.revision))
    assert raised.value.revision == last.revision
    assert (await anext(kv.watch("k", start_revision=last.revision))).value == b"2"


async def test_a_slow_reader_misses_nothing_and_delays_no_other(kv):
    slow = kv.watch("k", queue_bytes=20_000)
    async with slow, kv.watch("k") as fast:
        values = [b"%06d" % number + b"x" * 500 for number in range(400)]
        for value in values:
            await kv.put("k", value)
        assert [event.value for event in await take(fast, 400)] == values
        assert slow.is_parked
        got = []
        while len(got) < 400:
            batch = await slow.next_batch()
            assert not got or batch[0].revision == got[-1].revision + 1
            got += batch
        assert [event.value for event in got] == values


async def test_a_reader_slower_than_compaction_is_told(kv):
    async with kv.watch("k", queue_bytes=20_000) as watch, kv.watch("k") as fast:
        for number in range(200):
            last = await kv.put("k", b"%06d" % number + b"x" * 500)
        await take(fast, 200)
        await kv.compact(last.revision)
        got = []
        with pytest.raises(Compacted) as raised:
            await read_all(watch, got)
        assert raised.value.revision == last.revision
        assert [event.revision for event in got] == list(range(got[0].revision, got[-1].revision + 1))
        assert len(got) < 200


async def test_refusals(kv):
    with pytest.raises(WatchCanceled, match="watcher range is empty"):
        await kv.watch("b", "a").ready()
    survivor = kv.watch("k")
    await survivor.ready()
    await kv.close()
    with pytest.raises(WatchCanceled, match="the client is closed"):
        await anext(survivor)
    with pytest.raises(WatchCanceled, match="the client is closed"):
        kv.watch("k")


@pytest.mark.long
async def test_members_die_and_no_event_is_lost_or_seen_twice(three):
    """Every member in turn is killed while a writer writes; two watches must see every revision once."""
    async with connect(three.endpoints, timeout_s=10) as kv:
        everything = kv.watch("k", prefix=True)
        filtered = kv.watch("k1")
        await everything.ready()
        await filtered.ready()
        written = []

        async def write(count):
            for _ in range(count):
                number = len(written)
                written.append(None)
                written[number] = await put_surely(kv, f"k{number % 3}", b"%d" % number)

        for member in three.members:
            await write(20)
            await asyncio.to_thread(member.kill)
            await write(20)
            await asyncio.to_thread(member.restart)
        last = await put_surely(kv, "k1", b"end")
        seen = await events_until(everything, last)
        assert [event.revision for event in seen] == sorted({event.revision for event in seen})
        history = await kv.range("k", prefix=True)
        assert {item.mod_revision for item in history} <= {event.revision for event in seen}
        assert set(written) <= {event.revision for event in seen}
        assert [event for event in seen if event.key == b"k1"] == await events_until(filtered, last)


@pytest.mark.long
@pytest.mark.parametrize(
    "program",
    [ETCD_FAST.with_flags("--experimental-watch-progress-notify-interval=100ms"), RAFTKV],
    ids=["etcd", "raftkv"],
)
def test_an_idle_watch_keeps_ahead_of_compaction(program):
    """Its member tells how far it is; so it can be resumed elsewhere though history has gone meanwhile."""

    async def scenario(cluster):
        async with connect(cluster.endpoints, timeout_s=20) as kv:
            kv.scope.hub.progress_interval_s = 0.05
            async with kv.watch("idle") as watch:
                for _ in range(5):
                    last = (await kv.put("busy", "x")).revision
                await until(lambda: watch.revision >= last)
                await kv.compact(last)
                await asyncio.to_thread(cluster.members[0].kill)
                await asyncio.to_thread(cluster.members[0].restart)
                await put_surely(kv, "idle", "now")
                assert (await anext(watch)).value == b"now"

    with Cluster(program) as cluster:
        asyncio.run(asyncio.wait_for(scenario(cluster), 90))


async def test_an_idle_watch_that_compaction_has_overtaken_is_told(member):
    async with connect(member.endpoints, timeout_s=20) as kv, kv.watch("idle") as watch:
        for _ in range(5):
            last = (await kv.put("busy", "x")).revision
        await kv.compact(last)
        await asyncio.to_thread(member.members[0].kill)
        await asyncio.to_thread(member.members[0].restart)
        with pytest.raises(Compacted) as raised:
            await anext(watch)
        assert raised.value.revision == last


async def put_surely(kv, key, value):
    """Repeat a put until it is acknowledged and return its revision; the test counts revisions, not values."""
    while True:
        try:
            return (await kv.put(key, value)).revision
        except StatusError as error:
            if error.definite:
                raise


async def read_all(watch, into):
    async for event in watch:
        into.append(event)


async def events_until(watch, revision):
    events = []
    while not events or events[-1].revision < revision:
        events += await watch.next_batch()
    return events
