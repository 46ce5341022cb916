"""Watching clients, and checks of their events: W1 to W10 and W12 of the reliability bar, event by event.

Owns the received events and the resume position of each watcher. The expected events are known: the matching events of
the replay (``replay.events``) from the watcher's start, each once and in order:

    W1 W2 W3  the next event is the next wanted one of the log, with the same bytes; at the end nothing is missing
    W4        a response ends with a whole revision
    W5        a watcher that lost its member continues elsewhere after the last revision that it has
    W6        progress up to r is reported when everything wanted up to r was delivered
    W7        filters, previous values
    W8        a watch that starts later gets nothing earlier
    W10       a slow watcher loses nothing, or is canceled because its history was compacted, which must be true
"""

from __future__ import annotations

import random
from typing import Any

from raftkv.pb import kv_pb2, rpc_pb2
from raftkv.pb.services import SERVICES
from tests.sim.clients.workload import PREFIX, PREFIX_END, Workload, key_name
from tests.sim.cluster import Cluster
from tests.sim.devices.calls import Stream
from tests.sim.replay import Event

WATCH = SERVICES["etcdserverpb.Watch"]["Watch"].path
_PROGRESS = rpc_pb2.WatchRequest(progress_request=rpc_pb2.WatchProgressRequest()).SerializeToString()
REOPEN_S = 0.1
PATIENCE_S = 3.0
"""A watcher that hears nothing for so long asks how far its member is, and then goes to another."""


class Watcher:
    """A client with one watch.

    Arguments:
        number: of this client.
    """

    def __init__(self, number: int, workload: Workload, cluster: Cluster, rng: random.Random) -> None:
        self._number = number
        self._workload = workload
        self._cluster = cluster
        self._replay = cluster.checkers.replay
        self._rng = rng
        is_range = rng.random() < 0.5
        self._key = PREFIX if is_range else key_name(rng.randrange(workload.parameters.keys_count))
        self._end = PREFIX_END if is_range else b""
        self._prev_kv = rng.random() < 0.4
        self._no_put, self._no_delete = rng.choice(((False, False),) * 4 + ((True, False), (False, True)))
        self._progress = rng.random() < 0.5
        self._next = 0
        """The first revision that it does not have yet; 0: every event after it is created."""
        self._position = 0
        self._stream: Stream | None = None
        self._streams = 0
        self._member_id = 0
        self._is_created = False
        self._heard_at = 0.0
        self.events_count = 0

    # -- the life of a client -------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin."""
        self._open()
        self._cluster.scheduler.after(PATIENCE_S * self._rng.random(), self._look)

    def _open(self) -> None:
        members = self._cluster.members_reachable()
        self._is_created = False
        if not members:
            self._cluster.scheduler.after(REOPEN_S, self._open)
            return
        self._streams += 1
        number = self._streams
        self._member_id = self._rng.choice(members)
        self._heard_at = self._cluster.scheduler.now
        stream = Stream(
            1_000_000 + 10_000 * self._number + number,
            lambda message: self._take(number, message),
            lambda error: self._lost(number, error),
        )
        self._stream = stream
        member = self._cluster.members[self._member_id]
        member.open(WATCH, stream)
        if self._next == 0 and self._rng.random() < 0.3:
            self._begin_at(self._workload.newest_revision + self._rng.randrange(-5, 10))
        member.call_soon(stream.send, self._create_request())
        if self._rng.random() < 0.3:  # while it may be behind
            member.call_soon(stream.send, _PROGRESS)

    def _begin_at(self, revision: int) -> None:
        self._next = max(revision, 1)
        self._position = self._replay.position(self._next)

    def _create_request(self) -> bytes:
        filters = [rpc_pb2.WatchCreateRequest.NOPUT] * self._no_put
        filters += [rpc_pb2.WatchCreateRequest.NODELETE] * self._no_delete
        create = rpc_pb2.WatchCreateRequest(
            key=self._key,
            range_end=self._end,
            start_revision=self._next,
            filters=filters,
            prev_kv=self._prev_kv,
            progress_notify=self._progress,
        )
        return rpc_pb2.WatchRequest(create_request=create).SerializeToString()

    def _lost(self, number: int, error: BaseException | None) -> None:
        if number == self._streams:
            self._cluster.scheduler.after(REOPEN_S * (1 + self._rng.random()), self._open)
            self._streams += 1

    def _look(self) -> None:
        """Randomly ask for progress, stop reading for a while, or move to another member."""
        self._cluster.scheduler.after(PATIENCE_S * (0.2 + self._rng.random()), self._look)
        stream = self._stream
        if stream is None or stream.is_over:
            return
        member = self._cluster.members[self._member_id]
        is_silent = self._cluster.scheduler.now - self._heard_at > PATIENCE_S
        chance = self._rng.random()
        if is_silent and chance < 0.5:
            self.leave()
        elif chance < 0.5:
            member.call_soon(stream.send, _PROGRESS)
        elif chance < 0.7 and not stream.is_stalled:
            stream.stall()
            self._cluster.scheduler.after(self._rng.random(), member.call_soon, stream.read_again)

    def leave(self) -> None:
        """Break the connection and continue at another member."""
        if self._stream is not None and not self._stream.is_over:
            member = self._cluster.members[self._member_id]
            member.streams.discard(self._stream)
            member.call_soon(self._stream.close)
            self._stream.is_over = True
            self._lost(self._streams, None)

    def settle(self) -> None:
        """Read all waiting responses, because the run ends."""
        if self._stream is not None and self._stream.is_stalled:
            self._cluster.members[self._member_id].call_soon(self._stream.read_again)

    # -- what it gets ---------------------------------------------------------------------------------------

    def _take(self, number: int, message: bytes) -> None:
        if number != self._streams:
            return
        response = rpc_pb2.WatchResponse.FromString(message)
        self._heard_at = self._cluster.scheduler.now
        self._cluster.journal.record("watch", self._number, response.header.revision, len(response.events))
        if response.compact_revision:
            self._compacted(response.compact_revision)
        elif response.created:
            self._is_created = True
            if self._next == 0:
                self._begin_at(response.header.revision + 1)
        elif response.canceled:
            self._fail("W10", f"was canceled without a reason: {response}")
        elif response.events:
            self._take_events(response)
        else:
            self._take_progress(response.header.revision)

    def _take_events(self, response: Any) -> None:
        events = self._replay.events
        for event in response.events:
            expected = self._next_wanted()
            if expected is None:
                self._fail("W2", f"was sent {event}, the log has nothing more for it")
            self._check_event(event, expected)
            self._position += 1
            self.events_count += 1
        last = events[self._position - 1].revision
        after = self._next_wanted()
        if after is not None and after.revision == last:
            self._fail("W4", f"was sent a part of revision {last}")
        if response.header.revision < last:
            self._fail("W6", f"was sent revision {last} under a header of {response.header.revision}")
        self._next = last + 1

    def _next_wanted(self) -> Event | None:
        events, position = self._replay.events, self._position
        while position < len(events) and not self._wants(events[position]):
            position += 1
        self._position = position
        return events[position] if position < len(events) else None

    def _wants(self, event: Event) -> bool:
        if event.revision < self._next or (self._no_delete if event.is_delete else self._no_put):
            return False
        return event.key == self._key or bool(self._end)

    def _check_event(self, event: Any, expected: Event) -> None:
        is_delete = event.type == kv_pb2.Event.DELETE
        if (is_delete, event.kv.SerializeToString()) != (expected.is_delete, expected.kv):
            self._fail("W3", f"was sent {event}, the next in the log is {expected}")
        previous = event.prev_kv.SerializeToString() if event.HasField("prev_kv") else None
        wanted = expected.previous if self._prev_kv else None
        if previous != wanted and not (previous is None and expected.revision - 1 < self._replay.compacted):
            self._fail("W7", f"was sent {event} with {previous!r} before it, in the log it is {wanted!r}")

    def _take_progress(self, revision: int) -> None:
        expected = self._next_wanted()
        if expected is not None and expected.revision <= revision:
            self._fail("W6", f"was sent progress to {revision} before {expected}")
        if self._is_created and self._next <= revision:
            self._next = revision + 1

    def _compacted(self, compact_revision: int) -> None:
        if compact_revision > self._replay.compacted or self._next >= compact_revision:
            self._fail(
                "W10",
                f"was canceled because {compact_revision} is compacted; it is at {self._next}, compacted is "
                f"{self._replay.compacted}",
            )
        self._begin_at(compact_revision)
        stream, self._streams = self._stream, self._streams + 1
        if stream is not None:
            member = self._cluster.members[self._member_id]
            member.streams.discard(stream)
            member.call_soon(stream.close)
        self._cluster.scheduler.after(REOPEN_S, self._open)

    def has_all(self) -> bool:
        """Whether the watcher has all matching events of the log."""
        return self._next > 0 and self._next_wanted() is None

    def describe(self) -> str:
        """Describe the next expected event."""
        return f"watcher {self._number} at member {self._member_id}, next {self._next}: {self._next_wanted()}"

    def _fail(self, property_id: str, text: str) -> None:
        self._cluster.checkers.fail(property_id, f"watcher {self._number} of {self._key!r} {text}")
