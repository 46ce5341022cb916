"""The cache beside a model: whole revisions, in order, never stale where that is asked for, whatever is lost."""

from __future__ import annotations

import random
import threading

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import raftkv.aio
from raftkv.client import cache as cache_module
from raftkv.client import control as control_module
from raftkv.client.errors import CacheBehind, CacheTooLarge, HistoryReplaced, StreamLost
from raftkv.errors import PermissionDeniedError
from tests.client.fake_store import FakeClusters
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


class Machine(RuleBasedStateMachine):
    """Rules are what others write and what fails; reads are begun by rules, and judged when they come back."""

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
                assert (update.kind == "RESTORED") == (update.cluster_id != cluster_id), "a change of clusters is told"
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
        """Once all is well again the cache is where the store is."""
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
import os
if os.environ.get("NOSHRINK"):
    from hypothesis import settings, Phase
    TestMachine.settings = settings(phases=[Phase.generate], max_examples=int(os.environ["NOSHRINK"]), stateful_step_count=30, deadline=None)
