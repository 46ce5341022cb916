"""The cache against a model: whole revisions in order, and no stale linearizable read when streams break."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from raftkv.client import control as control_module
from raftkv.client import paging as paging_module
from raftkv.client.errors import CacheBehind, CacheTooLarge, HistoryReplaced, StreamLost, WatchCanceled
from raftkv.errors import PermissionDeniedError
from tests.client.fake_store import FakeClusters, History
from tests.virtual_loop import NodeLoop, Scheduler

PREFIX = b"jobs/"
INSIDE = [b"jobs/a", b"jobs/b", b"jobs/b/c", b"jobs/z"]
OUTSIDE = [b"job", b"jobs0", b"zzz"]
VALUES = [b"1", b"2", None]


def below(state):
    return {key: entry for key, entry in state.items() if key.startswith(PREFIX)}


def shown(items):
    return {item.key: (item.value, item.version, item.create_revision, item.mod_revision) for item in items}


class World:
    """One client on virtual time, and its clusters."""

    def __init__(self, version="3.6.0", seed=0):
        self.scheduler = Scheduler(random.Random(seed))
        self.loop = NodeLoop(self.scheduler)
        self.core = self.loop.enter(FakeClusters, version, seed)
        self.kv = self.loop.enter(self.core.client)

    def begin(self, coroutine):
        return self.loop.enter(self.loop.create_task, coroutine)

    def run(self, seconds=0.0):
        self.scheduler.run_until(self.scheduler.now + seconds)

    def finish(self, coroutine, seconds=60.0):
        task = self.begin(coroutine)
        self.scheduler.run_until(self.scheduler.now + seconds, task.done)
        assert task.done(), "it waits for ever"
        return task.result()

    def cache(self, **options):
        return self.finish(self.kv.cache(PREFIX, **options).start())

    def write(self, **changes):
        self.core.write({f"jobs/{key}".encode(): value for key, value in changes.items()})


@pytest.fixture
def world():
    return World()


class Machine(RuleBasedStateMachine):
    """Each rule is a write of another client, a failure, or the begin of a read; reads are checked at their end."""

    def __init__(self):
        super().__init__()
        self.log = []  # every state that any cluster had, in the order of real time
        self.reads = []
        self.mirror = {}
        self.updates = []
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(control_module, "PAGE_KEYS", 2)

    @initialize(version=st.sampled_from(["3.5.1", "3.6.0"]), seed=st.integers(0, 99))
    def start(self, version, seed):
        self.world = World(version, seed)
        self.core = self.world.core
        self.write({b"jobs/a": b"1", b"zzz": b"1"})
        self.cache = self.world.cache(indexes={"value": lambda item: [item.value]})
        self.world.begin(self.follow())
        self.world.run()

    async def follow(self):
        cluster_id, last = 0, 0
        async for update in self.cache.subscribe():
            if update.kind == "SNAPSHOT":
                self.mirror = {}
            else:
                assert update.kind == "RESTORED" or update.cluster_id == cluster_id, "a change of clusters has a word"
                assert update.kind == "RESTORED" or update.revision > last, "it went back, or came twice"
            order = [event.revision for event in update.events]
            assert update.kind != "EVENTS" or order == sorted(order)
            for event in update.events:
                if event.type == "DELETE":
                    del self.mirror[event.key]
                else:
                    entry = shown([event.kv])[event.key]
                    assert self.mirror.get(event.key) != entry, "a change that is none"
                    self.mirror[event.key] = entry
            cluster_id, last = update.cluster_id, update.revision
            self.check_state(update.revision, self.mirror)

    def check_state(self, revision, items, first=0):
        """The keys are those of one revision, which the store was at since a moment of the log."""
        assert any(at == revision and state == items for at, state in self.log[first:]), (revision, items, first)

    @rule(changes=st.dictionaries(st.sampled_from(INSIDE + OUTSIDE), st.sampled_from(VALUES), min_size=1, max_size=3))
    def write(self, changes):
        self.core.write(changes)
        self.note()

    def note(self):
        now = self.core.history_now
        self.log.append((now.revision, below(now.states[now.revision])))

    @rule(key=st.sampled_from(OUTSIDE), value=st.sampled_from([b"3", b"4"]))
    def write_outside(self, key, value):
        self.write({key: value})

    @rule()
    def compact(self):
        self.core.history_now.compact()
        self.core.move()

    @rule(apply=st.booleans(), events=st.booleans())
    def hold(self, apply, events):
        self.core.holds_apply, self.core.holds_events = apply, events
        self.core.move()

    @rule(is_down=st.booleans())
    def outage(self, is_down):
        self.core.is_down = is_down

    @rule()
    def lose_stream(self):
        self.core.lose_stream()

    @rule(lost=st.booleans(), back=st.integers(0, 3), data=st.data())
    def restore(self, lost, back, data):
        """Another cluster, with a state from before and other writes since; the old member may still be connected."""
        old = self.core.history_now
        at = max(old.first_revision, old.revision - back)
        state = old.states[at]
        self.core.replace(at + data.draw(st.integers(0, 2)), state)
        self.note()
        if lost:
            self.core.lose_stream()

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.2, 3.0]))
    def pass_time(self, seconds):
        self.world.run(seconds)

    @rule(linearizable=st.booleans(), ahead=st.integers(-2, 2), timeout_s=st.sampled_from([0.05, 2.0]))
    def read(self, linearizable, ahead, timeout_s):
        wanted = max(self.core.history_now.revision + ahead, 0)
        is_new = len(self.core.histories)

        async def reading():
            try:
                page = await self.cache.range(min_revision=wanted, linearizable=linearizable, timeout_s=timeout_s)
            except (CacheBehind, HistoryReplaced):
                return
            assert page.revision >= wanted or len(self.core.histories) > is_new
            self.check_state(page.revision, shown(page), first)

        # The state of the last entry is what was there when the call began.
        first = len(self.log) - 1 if linearizable else 0
        self.reads.append(self.world.begin(reading()))

    @invariant()
    def checks_hold(self):
        if not hasattr(self, "cache"):
            return
        assert self.world.scheduler.failures == []
        for task in [task for task in self.reads if task.done()]:
            task.result()
            self.reads.remove(task)
        copy = self.cache.copy
        if copy.revision:
            self.check_state(copy.revision, shown(copy.get_range()))
            by_value = {value: shown(copy.select_items("value", value)) for value in VALUES if value}
            assert {key: entry for found in by_value.values() for key, entry in found.items()} == {
                key: entry for key, entry in shown(copy.get_range()).items() if entry[0] in by_value
            }
            assert copy.size_bytes == sum(len(item.key) + len(item.value) + 800 for item in copy.get_range())

    def teardown(self):
        try:
            if hasattr(self, "cache"):
                self.end()
        finally:
            self.patch.undo()

    def end(self):
        """Check that without faults the cache reaches the state of the store."""
        self.core.is_down = self.core.holds_apply = self.core.holds_events = False
        self.core.lose_stream()
        self.world.run(10.0)
        self.checks_hold()
        page = self.world.finish(self.cache.range(linearizable=True))
        now = self.core.history_now
        assert (page.revision, shown(page)) == (now.revision, below(now.states[now.revision]))
        self.world.run()
        assert self.mirror == shown(page)
        self.world.finish(self.cache.close())
        assert not self.core.history_now.revision < page.revision
        self.world.scheduler.tear_down()


TestMachine = Machine.TestCase
TestMachine.settings = settings(stateful_step_count=30, deadline=None)


# ---- linearizable reads


@pytest.mark.parametrize("version", ["3.5.1", "3.6.0"])
def test_linearizable_read_of_an_unchanged_prefix_moves_no_key_over_the_wire(version):
    world = World(version)
    world.write(a=b"1", b=b"1")
    cache = world.cache()
    for number in range(10):
        world.core.write({b"zzz": b"%d" % number})
        page = world.finish(cache.range(linearizable=True))
        assert page.revision == world.core.history_now.revision
    assert world.core.asked["list"] == 1
    assert (world.core.asked["compare"] > 0) == (version == "3.5.1")


def test_many_linearizable_reads_at_once_share_a_question_that_is_sent_after_them(world):
    world.write(a=b"1")
    cache = world.cache()
    world.core.asked.clear()
    early = [world.begin(cache.get("jobs/a", linearizable=True)) for _ in range(100)]
    world.run(0.0)
    assert world.core.asked["key"] <= 1
    world.write(a=b"2")
    late = [world.begin(cache.get("jobs/a", linearizable=True)) for _ in range(100)]
    world.run(1.0)
    assert {task.result().value for task in late} == {b"2"}
    assert all(task.done() for task in early)
    assert world.core.asked["key"] == 2


def test_read_that_begins_during_a_round_does_not_take_its_answer():
    """The answer of the first question is under way when the write is acknowledged."""
    for seed in range(20):
        world = World(seed=seed)
        world.write(a=b"1")
        cache = world.cache()
        world.core.holds_events = True
        first = world.begin(cache.get("jobs/a", linearizable=True))
        for number in range(3):
            world.run(0.05 * number)
            world.write(a=b"%d" % number)
            read = world.begin(cache.get("jobs/a", linearizable=True))
            world.loop.call_later(0.3, setattr, world.core, "holds_events", False)
            world.loop.call_later(0.3, world.core.move)
            world.run(2.0)
            assert read.result().value == b"%d" % number
            world.core.holds_events = True
        assert first.done()


@pytest.mark.parametrize("change", [{"a": None}, {"a": b"2"}, {"a": None, "d": b"1"}, {"d": b"1"}])
def test_early_answer_for_progress_is_not_believed(change):
    """Etcd 3.5.1 reports the revision of a write before the event of it."""
    world = World("3.5.1")
    world.write(a=b"1", b=b"1")
    cache = world.cache()
    world.core.holds_events = True
    world.write(**change)
    read = world.begin(cache.range(linearizable=True, timeout_s=1.0))
    world.run(2.0)
    with pytest.raises(CacheBehind, match="did not come to now within 1 s"):
        read.result()
    world.core.holds_events = False
    world.core.move()
    now = world.core.history_now
    assert shown(world.finish(cache.range(linearizable=True))) == below(now.states[now.revision])


def test_progress_of_isolated_member_does_not_confirm_read(world):
    world.write(a=b"1")
    cache = world.cache()
    world.core.holds_apply = True
    world.write(a=b"2")
    read = world.begin(cache.get("jobs/a", linearizable=True, timeout_s=1.0))
    world.run(2.0)
    with pytest.raises(CacheBehind):
        read.result()
    assert world.finish(cache.get("jobs/a")).value == b"1"


def test_another_watch_that_is_behind_does_not_hold_up_a_read(world):
    """Members drop the question for progress while one of the stream's watches is behind."""
    world.write(a=b"1")
    cache = world.cache()
    member = world.core.calls[-1]
    member.watches[99] = [member.requests[0].create_request, 10**6]  # of a future revision
    world.core.write({b"zzz": b"1"})
    assert world.finish(cache.range(linearizable=True), 1.0).revision == world.core.history_now.revision


# ---- other clusters


def test_list_and_watch_of_two_clusters_are_not_taken_for_one(world):
    """The stream is down while the cluster is listed, and then leads to another cluster."""
    world.write(a=b"1", b=b"1")
    world.core.refuse = StreamLost("down")
    cache = world.cache()
    state = {**world.core.history_now.states[2], b"jobs/a": (b"other", 1, 2, 2)}
    world.core.replace(2, state)
    world.core.refuse = None
    world.run(10.0)
    assert world.finish(cache.get("jobs/a")).value == b"other"


def test_linearizable_read_does_not_answer_for_a_revision_of_a_cluster_that_is_gone():
    """The copy had the revision, and the confirmation of the read found the cluster restored to an earlier one."""
    world = World("3.5.1")
    world.write(a=b"1")
    cache = world.cache()
    revision = world.core.history_now.revision
    world.core.replace(revision - 1, {})
    read = world.begin(cache.range(min_revision=revision, linearizable=True))
    world.run(10.0)
    with pytest.raises(HistoryReplaced):
        read.result()
    assert world.finish(cache.range(linearizable=True)).revision == revision - 1
    world.finish(cache.close())
    world.scheduler.tear_down()


def test_wait_for_a_revision_of_a_cluster_that_is_gone_fails(world):
    world.write(a=b"1")
    cache = world.cache()
    updates = world.begin(anext_of(cache.subscribe(), 2))
    wait = world.begin(cache.wait(100))
    world.run()
    world.core.replace(1, {b"jobs/b": (b"1", 1, 1, 1)})
    world.core.lose_stream()
    world.run(3.0)
    with pytest.raises(HistoryReplaced):
        wait.result()
    seen = [(one.kind, one.cluster_id, [(event.type, event.key) for event in one.events]) for one in updates.result()]
    assert seen == [("SNAPSHOT", 7, [("PUT", b"jobs/a")]), ("RESTORED", 8, [("DELETE", b"jobs/a"), ("PUT", b"jobs/b")])]


def test_history_that_goes_back_under_the_same_id_is_noticed_by_a_linearizable_read(world):
    for number in range(5):
        world.write(a=b"%d" % number)
    cache = world.cache()
    world.core.replace(2, world.core.history_now.states[2], cluster_id=7)
    world.core.lose_stream()
    world.run(1.0)
    assert world.finish(cache.get("jobs/a", linearizable=True)).value == b"0"
    assert cache.revision == 2


# ---- limits, refusals, the end


def test_cache_that_would_be_too_large_ends_and_says_so(world):
    world.write(a=b"1")
    with pytest.raises(CacheTooLarge, match="would hold more than max_bytes=300: raise max_bytes"):
        world.cache(max_bytes=300)
    cache = world.cache(max_bytes=1_000)
    updates = world.begin(anext_of(cache.subscribe(), 3))
    waiting = world.begin(cache.wait(100))
    world.write(b=b"1")
    world.run(1.0)
    world.write(b=None, c=b"x" * 150)
    world.run(1.0)
    assert len(world.finish(cache.range())) == 2
    world.write(c=b"x" * 300)
    world.run(1.0)
    assert [update.kind for update in updates.result()] == ["SNAPSHOT", "EVENTS", "EVENTS"]
    for read in (
        cache.get("jobs/a"),
        cache.range(),
        cache.get("jobs/a", linearizable=True),
        anext_of(cache.subscribe()),
    ):
        with pytest.raises(CacheTooLarge):
            world.finish(read)
    with pytest.raises(CacheTooLarge):
        waiting.result()
    assert isinstance(cache.error, CacheTooLarge)
    assert cache.size_bytes == 0
    world.run(1.0)
    assert not world.core.calls[-1].watches


def test_cache_of_large_values_is_not_read_far_above_its_limit(monkeypatch):
    """The first page was 10,000 keys of any size, of which 512 MiB came before they were found to be too many."""
    world, shown_bytes = World(), []
    world.write(**{f"k{number:04}": b"x" * 1_000 for number in range(1_000)})
    answer = History.range

    def count(history, request):
        found = answer(history, request)
        shown_bytes.append(found.ByteSize())
        return found

    monkeypatch.setattr(History, "range", count)
    monkeypatch.setattr(paging_module, "PAGE_BYTES", 50_000)
    with pytest.raises(CacheTooLarge):
        world.cache(max_bytes=200_000)
    assert sum(shown_bytes) < 400_000


async def anext_of(updates, count=1):
    return [await anext(updates) for _ in range(count)]


def test_refusal_ends_the_start_and_later_only_shows(world):
    world.core.refusal = PermissionDeniedError()
    with pytest.raises(PermissionDeniedError):
        world.cache()
    world.core.refusal = None
    world.write(a=b"1")
    cache = world.cache()
    assert cache.error is None
    world.core.refusal = PermissionDeniedError()
    world.core.holds_events = True
    world.write(a=b"2")
    world.core.history_now.compact()
    world.core.write({b"zzz": b"1"})
    world.core.holds_events = False
    world.core.move()
    world.run(1.0)
    assert isinstance(cache.error, PermissionDeniedError)
    assert world.finish(cache.get("jobs/a")).value == b"1"
    with pytest.raises(PermissionDeniedError):
        world.finish(cache.get("jobs/a", linearizable=True))
    world.core.refusal = None
    assert world.finish(cache.get("jobs/a", linearizable=True)).value == b"2"


def test_cluster_that_does_not_answer_ends_the_start_in_time(world):
    world.core.is_down = True
    with pytest.raises(CacheBehind, match="is at revision 0 and did not come to its first list within 3 s"):
        world.finish(world.kv.cache("jobs/").start(3.0))


def test_slow_subscriber_gets_a_snapshot_and_no_more_memory(monkeypatch):
    monkeypatch.setattr("raftkv.client.cache.QUEUE_BYTES", 3_000)
    world = World()
    world.write(a=b"1")
    cache = world.cache()
    updates = cache.subscribe()
    assert [update.kind for update in world.finish(anext_of(updates))] == ["SNAPSHOT"]
    for number in range(20):
        world.write(a=b"%d" % number)
        world.run(0.1)
    (update,) = world.finish(anext_of(updates))
    assert (update.kind, update.revision) == ("SNAPSHOT", world.core.history_now.revision)
    world.write(a=b"last")
    assert [update.kind for update in world.finish(anext_of(updates))] == ["EVENTS"]


def test_subscribers_at_one_revision_share_a_snapshot(world):
    world.write(a=b"1")
    cache = world.cache()
    first, second = (world.finish(anext_of(cache.subscribe()))[0] for _ in range(2))
    assert first is second


def test_close_ends_waits_rounds_and_subscriptions(world):
    world.write(a=b"1")
    cache = world.cache()
    world.core.holds_apply = True
    world.core.write({b"zzz": b"1"})
    updates = world.begin(anext_of(cache.subscribe(), 2))
    waits = [world.begin(cache.wait(100)), world.begin(cache.wait(linearizable=True))]
    world.run(0.1)
    world.finish(cache.close())
    world.run(0.1)
    with pytest.raises(StopAsyncIteration):
        updates.result()
    for wait in [*waits, world.begin(cache.get("jobs/a"))]:
        world.run()
        with pytest.raises(WatchCanceled, match="is closed"):
            wait.result()
    world.finish(cache.close())


def test_cache_is_started_once(world):
    cache = world.kv.cache("jobs/")
    with pytest.raises(RuntimeError, match="was not started"):
        world.finish(cache.get("jobs/a"))
    world.finish(cache.start())
    with pytest.raises(RuntimeError, match="was started before"):
        world.finish(cache.start())


# ---- what reads return


def test_index_leaves_out_keys_that_its_function_cannot_read(world, caplog):
    world.write(a=b"1", b=b"x")
    cache = world.cache(indexes={"number": lambda item: [int(item.value)], "all": lambda item: [1, 1, "x"]})
    world.write(c=b"1", d=b"2")
    world.run(1.0)
    assert [item.key for item in world.finish(cache.select("number", 1))] == [b"jobs/a", b"jobs/c"]
    assert world.finish(cache.select("number", 7)).items == ()
    assert world.finish(cache.select("all", "x")).count == 4
    assert "the index number skipped key b'jobs/b': ValueError" in caplog.text
    with pytest.raises(ValueError, match="has no index 'owner'"):
        world.finish(cache.select("owner", 1))


RANGES = [
    ((), {}, [b"a", b"ab", b"b"], False),
    ((), {"limit": 2}, [b"a", b"ab"], True),
    (("a",), {}, [b"a"], False),
    (("aa",), {}, [], False),
    (("a",), {"prefix": True}, [b"a", b"ab"], False),
    (("ab", "b"), {}, [b"ab"], False),
    (("b", "a"), {}, [], False),
]


@pytest.mark.parametrize(("args", "options", "keys", "more"), RANGES)
@pytest.mark.parametrize("prefix", ["jobs/", "", "\xff"])
def test_cache_ranges_match_store(world, args, options, keys, more, prefix):
    start = prefix.encode()
    world.core.write({start + key: b"1" for key in (b"a", b"ab", b"b")})
    cache = world.finish(world.kv.cache(prefix).start())
    page = world.finish(cache.range(*(prefix + arg for arg in args), **options))
    assert ([item.key for item in page], page.more) == ([start + key for key in keys], more)


@pytest.mark.parametrize(
    ("args", "options"),
    [(("x",), {}), (("",), {"prefix": True}), (("jobs/a", "k"), {}), (("jobs/a", "\0"), {}), ((None, "x"), {})],
)
def test_reads_outside_of_the_prefix_are_refused_not_empty(world, args, options):
    cache = world.cache()
    with pytest.raises(ValueError, match=r"outside of the cache|give a key"):
        world.finish(cache.range(*args, **options))
    with pytest.raises(ValueError, match="outside of the cache"):
        world.finish(cache.get("x"))
