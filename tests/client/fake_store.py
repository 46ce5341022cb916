"""Fake clusters with a history behind a client's core: members that lag, drop, overtake and disappear on request."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from raftkv.client.errors import StreamLost
from raftkv.client.lease import LeaseKeeper
from raftkv.client.library import Client
from raftkv.client.scope import Scope, Space
from raftkv.client.watch import WatchHub
from raftkv.errors import CompactedError, FutureRevisionError
from raftkv.pb import rpc_pb2
from tests.client.fake_watches import FakeCall, FakeCore


class History:
    """One cluster: its state at every revision, as key to (value, version, create revision, mod revision)."""

    def __init__(self, cluster_id, state=None, revision=1):
        self.cluster_id = cluster_id
        self.first_revision = self.revision = revision
        self.compacted = 0
        self.states = {revision: dict(state or {})}

    def write(self, changes):
        """Change several keys in one revision; None: delete."""
        state = dict(self.states[self.revision])
        at = self.revision + 1
        for key, value in changes.items():
            if value is None:
                state.pop(key, None)
            else:
                _, version, created, _ = state.get(key, (b"", 0, at, 0))
                state[key] = (value, version + 1, created, at)
        if state != self.states[self.revision]:
            self.revision = at
            self.states[at] = state

    def compact(self):
        self.compacted = self.revision

    def range(self, request):
        if request.revision > self.revision:
            raise FutureRevisionError
        if request.revision and (request.revision < self.compacted or request.revision not in self.states):
            raise CompactedError
        state = self.states[request.revision or self.revision]
        key, end = request.key, request.range_end
        keys = [k for k in sorted(state) if (k == key if not end else k >= key and (end == b"\0" or k < end))]
        wanted = [k for k in keys if state[k][3] >= request.min_mod_revision]
        shown = [] if request.count_only else wanted[: request.limit or None]
        answer = rpc_pb2.RangeResponse(count=len(keys), more=not request.count_only and len(shown) < len(wanted))
        for k in shown:
            fill(answer.kvs.add(), k, state[k])
        return answer

    def events(self, request, first, last):
        """The events of an interval between two revisions, both included."""
        found = []
        for at in range(max(first, self.first_revision + 1), last + 1):
            before, after = self.states[at - 1], self.states[at]
            for key in sorted(before.keys() | after.keys()):
                inside = key >= request.key and (request.range_end == b"\0" or key < request.range_end)
                if inside and before.get(key) != after.get(key):
                    found.append((at, key, after.get(key)))
        return found


def fill(kv, key, entry):
    kv.key = key
    kv.value, kv.version, kv.create_revision, kv.mod_revision = entry


class Member(FakeCall):
    """One member with one stream; it has applied its cluster's history up to ``applied``."""

    def __init__(self, core):
        super().__init__(core)
        self.history = core.history_now
        self.applied = self.history.revision

    def handle(self, request):
        kind = request.WhichOneof("request_union")
        if kind == "create_request":
            create = request.create_request
            start = create.start_revision or self.applied + 1
            self.send(watch_id=create.watch_id, created=True)
            if start <= self.history.compacted:
                self.send(watch_id=create.watch_id, canceled=True, compact_revision=self.history.compacted)
                return
            self.watches[create.watch_id] = [create, start]
        elif kind == "cancel_request" and self.watches.pop(request.cancel_request.watch_id, None) is not None:
            self.send(watch_id=request.cancel_request.watch_id, canceled=True)
        elif kind == "progress_request":
            is_behind = any(start <= self.applied for _, start in self.watches.values())
            in_future = any(start > self.applied + 1 for _, start in self.watches.values())
            if self.cluster.overtakes or not (is_behind or in_future):
                self.send(watch_id=-1)
        self.move()

    def send(self, events=(), **fields):
        response = rpc_pb2.WatchResponse(**fields)
        response.header.revision, response.header.cluster_id = self.applied, self.history.cluster_id
        for at, key, entry in events:
            event = response.events.add()
            if entry is None:
                event.type, event.kv.key, event.kv.mod_revision = 1, key, at
            else:
                fill(event.kv, key, entry)
        self.inbox.put_nowait(response.SerializeToString())

    def move(self):
        """Apply committed changes and send their events, unless these are held."""
        if not self.cluster.holds_apply:
            self.applied = self.history.revision
        for watch_id, watch in list(self.watches.items()) if not self.cluster.holds_events else ():
            create, start = watch
            if start <= self.history.compacted < self.applied:
                self.send(watch_id=watch_id, canceled=True, compact_revision=self.history.compacted)
                del self.watches[watch_id]
                continue
            events = self.history.events(create, start, self.applied)
            watch[1] = max(start, self.applied + 1)
            if events:
                self.send(events, watch_id=watch_id)


class FakeClusters(FakeCore):
    """The core of a client whose endpoints lead to successive clusters.

    Attributes:
        overtakes: members answer for progress before they have sent all events, as etcd 3.5.1 does.
        holds_apply, holds_events: the member with the stream applies nothing, sends no events.
        is_down: no call is answered.
        refusal: an error that calls end with.
        asked: calls by what they ask for.
    """

    def __init__(self, version="3.6.0", seed=0):
        super().__init__(version)
        self.overtakes = version.startswith("3.5")
        self.history_now = History(7)
        self.histories = [self.history_now]
        self.holds_apply = self.holds_events = self.is_down = False
        self.refusal = None
        self.asked = Counter()
        self._rng = random.Random(seed)

    async def stream(self, method, endpoint=None, **_):
        stream = await super().stream(method, endpoint, metadata=(("hasleader", "true"),))
        stream.call = self.calls[-1] = Member(self)
        return stream

    async def call(self, method, request, *, timeout_s=None, metadata=()):
        await self._pause()
        if self.refusal is not None:
            raise self.refusal
        if self.is_down:
            raise StreamLost("down")
        history = self.history_now
        answer = rpc_pb2.TxnResponse(succeeded=True)
        answer.header.revision, answer.header.cluster_id = history.revision, history.cluster_id
        for operation in request.success:
            asked = operation.request_range
            kind = "key" if not asked.range_end else "compare" if asked.min_mod_revision else "list"
            self.asked[kind] += 1
            answer.responses.add().response_range.CopyFrom(history.range(asked))
        await self._pause()
        return answer

    async def _pause(self):
        for _ in range(self._rng.randrange(3)):
            await asyncio.sleep(self._rng.choice((0.0, 0.001, 0.1)))

    # ---- what tests do

    def write(self, changes):
        self.history_now.write(changes)
        self.move()

    def move(self):
        for call in self.calls:
            if not call.done:
                call.move()

    def lose_stream(self):
        for call in self.calls:
            if not call.done:
                call.fail()

    def replace(self, revision, state, cluster_id=0):
        """Restore another cluster; streams to the old one go on until they are lost."""
        self.history_now = History(cluster_id or self.history_now.cluster_id + 1, state, revision)
        self.histories.append(self.history_now)

    def client(self):
        return Client(Scope(self, Space(), 5.0, WatchHub(self, 5.0), LeaseKeeper(self)))
