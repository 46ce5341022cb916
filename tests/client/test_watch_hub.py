"""The shared watch stream against a minimal cluster: resuming, parking, progress, refusals."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing, asynccontextmanager

import pytest

from raftkv import errors
from raftkv.client.errors import EndpointsFailed, HistoryReplaced, WatchCanceled
from raftkv.client.scope import Space
from raftkv.client.watch import Request, Watch, Watcher, WatchHub, responses
from tests.client.fake_watches import FakeCore
from tests.client.waiting import until
from tests.long import long_except


def play(scenario, core=None, **options):
    core = core or FakeCore()

    async def main():
        hub = WatchHub(core, **options)
        try:
            await asyncio.wait_for(scenario(core, hub), 90)
        finally:
            await hub.close()

    asyncio.run(main())


@pytest.fixture
def core():
    return FakeCore()


@pytest.fixture
@asynccontextmanager
async def hub(core):
    hub = WatchHub(core)
    try:
        yield hub
    finally:
        await hub.close()


def watching(hub, start_revision=0, queue_bytes=1_000_000, **request):
    return Watch(hub, Space(), Watcher(Request(b"k", start_revision=start_revision, **request), queue_bytes), 5.0)


async def revisions(watch, count):
    return [(await anext(watch)).revision for _ in range(count)]


def created(call):
    return [r.create_request for r in call.requests if r.WhichOneof("request_union") == "create_request"]


async def test_a_broken_stream_is_resumed_behind_the_last_event(core, hub):
    watch = watching(hub)
    await watch.ready()
    core.write()
    core.write()
    assert await revisions(watch, 2) == [1, 2]
    core.calls[0].fail()
    core.write()
    assert await revisions(watch, 1) == [3]
    assert [create.start_revision for call in core.calls for create in created(call)] == [0, 3]
    assert core.left == ["m0"]
    core.calls[1].inbox.put_nowait(None)  # a member that stops well ends the stream without an error
    core.write()
    assert await revisions(watch, 1) == [4]


async def test_an_idle_watch_is_resumed_behind_its_creation(core, hub):
    core.write()
    watch = watching(hub)
    await watch.ready()
    assert watch.revision == 1
    core.calls[0].fail()
    core.write()
    assert await revisions(watch, 1) == [2]
    assert created(core.calls[1])[0].start_revision == 2


async def test_a_cluster_that_was_restored_has_no_next_event_for_a_watch_of_before(core, hub):
    """End the watch: it waited for a revision that the new cluster reached much later, and missed all until then."""
    core.write()
    watch = watching(hub)
    await watch.ready()
    core.cluster_id, core.revision, core.history = 8, 0, {}
    core.calls[0].fail()
    with pytest.raises(HistoryReplaced):
        await anext(watch)
    assert isinstance(watch._watcher.error, errors.CompactedError)
    again = watching(hub)
    await again.ready()
    core.write()
    assert await revisions(again, 1) == [1]


async def test_repeated_events_are_dropped(core, hub):
    watch = watching(hub, start_revision=1)
    await watch.ready()
    core.write()
    core.write()
    core.calls[0].answer(1, events=[(b"k", b"", 2), (b"k", b"", 3)])
    core.calls[0].answer(1, events=[(b"k", b"", 1)])
    core.calls[0].answer(1, events=[(b"k", b"", 4)])
    assert await revisions(watch, 4) == [1, 2, 3, 4]


@pytest.mark.parametrize("seed", long_except(range(20), range(6)))
async def test_nothing_is_lost_or_seen_twice_under_any_fault(core, hub, seed):
    """Writes, broken streams, slow and fast readers, opened and closed watches, in any order."""
    rng = random.Random(seed)
    watches = [watching(hub, start_revision=1, queue_bytes=rng.choice((60, 500, 10**6))) for _ in range(4)]
    seen = [[] for _ in watches]

    async def read(number):
        for _ in range(rng.randrange(8)):
            if len(seen[number]) < core.revision:
                seen[number].append((await anext(watches[number])).revision)

    for _ in range(60):
        action = rng.randrange(6)
        if action < 3:
            core.write()
        elif action == 3 and core.calls:
            core.calls[-1].fail()
        elif action == 4:
            passing = watching(hub)
            await asyncio.sleep(0)
            passing.cancel()
        else:
            await read(rng.randrange(len(watches)))
    for number, watch in enumerate(watches):
        while len(seen[number]) < core.revision:
            seen[number].append((await anext(watch)).revision)
    assert seen == [list(range(1, core.revision + 1))] * len(watches)


async def test_a_full_queue_parks_only_its_watch(core, hub):
    slow, fast = watching(hub, queue_bytes=200), watching(hub)
    await slow.ready()
    await fast.ready()
    for _ in range(50):
        core.write()
    assert await revisions(fast, 50) == list(range(1, 51))
    assert slow.is_parked
    cancels = [r for r in core.calls[0].requests if r.HasField("cancel_request")]
    assert [cancel.cancel_request.watch_id for cancel in cancels] == [1]
    assert slow.revision == 0
    assert await revisions(slow, 50) == list(range(1, 51))
    assert len(core.calls) == 1


def test_progress_advances_only_the_watches_it_names():
    async def scenario(core, hub):
        early = watching(hub)
        await early.ready()
        core.answers = False
        await until(lambda: any(r.HasField("progress_request") for r in core.calls[0].requests))
        late = watching(hub, start_revision=1)
        await until(lambda: len(created(core.calls[0])) == 2)
        core.calls[0].answer(2, created=True)
        await late.ready()
        core.calls[0].answer(-1, revision=70)
        await until(lambda: early.revision == 70)
        assert late.revision == 0
        asked = len(core.calls[0].requests)
        await until(lambda: len(core.calls[0].requests) > asked)
        while late.revision < 80:
            core.calls[0].answer(-1, revision=80)
            await asyncio.sleep(0)
        core.calls[0].answer(2, revision=90)  # and what is said to one alone is for it alone
        await until(lambda: late.revision == 90)
        assert early.revision == 80

    play(scenario, progress_interval_s=0.01)


def test_members_that_may_answer_too_early_are_not_asked():
    async def scenario(core, hub):
        watch = watching(hub)
        await watch.ready()
        asked = asyncio.create_task(until(lambda: any(r.HasField("progress_request") for r in core.calls[0].requests)))
        task = next(task for task in asyncio.all_tasks() if "_ask_for_progress" in repr(task))
        await task  # ends by itself
        asked.cancel()
        assert len(core.calls[0].requests) == 1

    play(scenario, FakeCore(version="3.5.1"), progress_interval_s=0.01)


async def test_reasons_of_a_member(core, hub):
    core.answers = False
    watches = [watching(hub) for _ in range(4)]
    await until(lambda: core.calls and len(core.calls[0].requests) == 4)
    call = core.calls[0]
    denied = "rpc error: code = PermissionDenied desc = etcdserver: permission denied"
    call.answer(-1, created=True, canceled=True, cancel_reason=denied)
    call.answer(2, created=True)
    call.answer(2, canceled=True, compact_revision=7)
    call.answer(3, created=True)
    call.answer(3, canceled=True, cancel_reason="mvcc: watcher range is empty")
    with pytest.raises(errors.PermissionDeniedError):
        await watches[0].ready()
    with pytest.raises(errors.CompactedError) as compacted:
        await anext(watches[1])
    assert compacted.value.revision == 7
    with pytest.raises(WatchCanceled, match=r"^watch canceled: mvcc: watcher range is empty$"):
        await anext(watches[2])
    assert not any(watch._watcher.ended for watch in watches[3:])


@pytest.mark.parametrize("is_new", [True, False])
async def test_watch_refused_by_limit_is_retried_from_its_position(core, hub, is_new):
    """By the rate at any time; by the number of watches if it was there before. The others on the stream go on."""
    watch, other = watching(hub, start_revision=5), watching(hub)
    await watch.ready()
    await other.ready()
    core.answers = False
    core.calls[0].fail(errors.UNAVAILABLE, "gone")
    await until(lambda: len(core.calls) == 2 and len(created(core.calls[1])) == 2)
    call = core.calls[1]
    rate = "user a: 1 requests/s; retry-after-ms: 1"
    reason = f"{errors.LimitedError.text} (raftkv: {rate if is_new else 'user a may have 2 watches of this member'})"
    call.answer(-1, created=True, canceled=True, cancel_reason=reason)
    call.answer(2, created=True)
    await until(lambda: len(created(call)) == 3)
    assert created(call)[2].start_revision == 5
    assert not watch._watcher.ended
    assert len(core.calls) == 2, "the stream of the other watch goes on"
    watch.cancel()
    other.cancel()


async def test_new_watch_above_the_number_of_a_limit_is_an_error(core, hub):
    core.answers = False
    watch = watching(hub)
    await until(lambda: core.calls and created(core.calls[0]))
    reason = f"{errors.LimitedError.text} (raftkv: user a may have 2 watches of this member)"
    core.calls[0].answer(-1, created=True, canceled=True, cancel_reason=reason)
    with pytest.raises(WatchCanceled, match="may have 2 watches"):
        await watch.ready()


async def test_a_token_that_has_expired_costs_a_stream(core, hub):
    watch = watching(hub, start_revision=5)
    await watch.ready()
    core.stale = "etcdserver: invalid auth token"
    reason = f"rpc error: code = Unauthenticated desc = {core.stale}"
    core.calls[0].answer(1, canceled=True, cancel_reason=reason)
    await until(lambda: len(core.calls) == 2 and created(core.calls[1]))
    assert created(core.calls[1])[0].start_revision == 5
    assert core.tokens_forgotten
    core.calls[1].fail(errors.UNAUTHENTICATED, core.stale)
    await until(lambda: len(core.calls) == 3)


async def test_error_that_every_member_would_give_ends_all_watches(core, hub):
    core.refuse = errors.PermissionDeniedError()
    watches = [watching(hub) for _ in range(2)]
    for watch in watches:
        with pytest.raises(errors.PermissionDeniedError):
            await watch.ready()
    core.refuse = None
    await watching(hub).ready()  # a later one tries again


async def test_bytes_that_are_no_message_are_told(core, hub):
    watch = watching(hub)
    await watch.ready()
    core.calls[0].inbox.put_nowait(b"\xff")
    with pytest.raises(WatchCanceled, match="DecodeError"):
        await anext(watch)


async def test_an_unconfirmed_watch_says_where_it_was_not_heard(core, hub):
    core.refuse = errors.NoLeaderError()
    watch = watching(hub)
    with pytest.raises(EndpointsFailed, match=r"^no answer within 0\.2 s from m0: etcdserver: no leader; m1: "):
        await watch.ready(timeout_s=0.2)
    core.refuse = None
    await watch.ready()


async def test_the_messages_of_members_come_in_order_each_event_once(core, hub):
    watcher = Watcher(Request(b"k", start_revision=1, progress=True))
    async with aclosing(responses(hub, watcher)) as received:
        following = asyncio.create_task(anext(received))
        await until(lambda: core.calls and created(core.calls[0]))
        core.write()
        assert [event.kv.mod_revision for event in (await following).events] == [1]
        core.calls[0].fail()
        await until(lambda: len(core.calls) == 2 and created(core.calls[1]))
        assert created(core.calls[1])[0].start_revision == 2
        core.calls[1].answer(2, events=[(b"k", b"1", 1), (b"k", b"2", 2)])
        assert [event.kv.mod_revision for event in (await anext(received)).events] == [2]
        hub.request_progress()
        core.calls[1].answer(-1, revision=9)
        assert (await anext(received)).header.revision == 9
        assert watcher.next_revision == 3  # it may have been told before all events were sent
        core.calls[1].answer(2, canceled=True, compact_revision=7)
        with pytest.raises(errors.CompactedError):
            await anext(received)
        assert watcher.refusal.compact_revision == 7
    assert not hub.watchers


async def test_an_outage_is_told_with_its_beginning(core, hub):
    told = []
    hub.on_failure = lambda: told.append((hub.failing_since, dict(hub.failures)))
    core.refuse = errors.NoLeaderError()
    watch = watching(hub)
    await until(lambda: len(told) == 2)
    assert told[0][0] == told[1][0]
    assert set(told[1][1]) == {"m0", "m1"}
    core.refuse = None
    await watch.ready()
    assert not hub.failures


def test_a_right_that_is_gone_ends_its_watch_and_no_other():
    """By a canceled watch, or by a stream that ends for all: each is asked for again, and has an answer of its own."""
    text = errors.PermissionDeniedError.text

    async def scenario(core, hub):
        kept, gone, also_gone = watching(hub), watching(hub), watching(hub)
        for watch in (kept, gone, also_gone):
            await watch.ready()
        core.write()
        for watch in (kept, gone, also_gone):
            assert await revisions(watch, 1) == [1]
        core.denied_ids = lambda: {w.id for w in (gone._watcher, also_gone._watcher)}
        core.calls[0].fail(errors.PERMISSION_DENIED, text)
        for watch in (gone, also_gone):
            with pytest.raises(errors.PermissionDeniedError):
                await anext(watch)
        core.write()
        assert await revisions(kept, 1) == [2]
        assert len(core.calls) == 3  # the second one ended to ask with a new token, the third is there

    play(scenario, Denying())


class Denying(FakeCore):
    """Refuses watches by their ids at present; tokens can be renewed."""

    denied_ids = staticmethod(set)

    def renew_token(self):
        return True

    async def stream(self, *args, **kwargs):
        stream = await super().stream(*args, **kwargs)
        handle = stream.call.handle

        def deny(request):
            create = request.create_request
            if create.watch_id in self.denied_ids() and request.WhichOneof("request_union") == "create_request":
                reason = f"rpc error: code = PermissionDenied desc = {errors.PermissionDeniedError.text}"
                stream.call.answer(-1, created=True, canceled=True, cancel_reason=reason)
            else:
                handle(request)

        stream.call.handle = deny
        return stream
