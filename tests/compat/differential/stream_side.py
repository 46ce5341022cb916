"""One of two clusters under comparison: its open watches and observers, its mirror, and names made equal.

What comes on a stream is brought into a form that two clusters share:

- a watcher's items: ("events", revision, events) for each revision, ("canceled", header revision, compact revision,
  reason). Where responses begin and end depends on time, and so does not count; that a revision comes whole does;
- a stream's control items: created, refused, progress, in order;
- ids of leases that a server chose become 1, 2, ... in the order of their appearance, in keys too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from raftkv.pb import kv_pb2, rpc_pb2
from tests.compat.differential.mirror import Interest, Mirror
from tests.compat.streams import Stream, Streams
from tests.compat.wire import Answer, Wire

WATCH = "etcdserverpb.Watch/Watch"
RANGE = "etcdserverpb.KV/Range"
EVERYTHING = rpc_pb2.WatchCreateRequest(key=b"\0", range_end=b"\0", prev_kv=True)
CHOSEN_LEASE_BASE = 1 << 40
"""Leases above this were chosen by a server: tests ask for small ids."""


class Names:
    """Lease ids that a server chose, and what stands for them."""

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}

    def lease(self, lease_id: int) -> int:
        """The id, or what stands for it."""
        if lease_id < CHOSEN_LEASE_BASE:
            return lease_id
        return -self._tokens.setdefault(lease_id, len(self._tokens) + 1) - (1 << 41)

    def key(self, key: bytes) -> bytes:
        """The key, with what stands for a lease id in it."""
        for lease_id, token in self._tokens.items():
            key = key.replace(b"%x" % lease_id, b"<lease %d>" % token)
        return key

    def settle(self, message: Any) -> Any:
        """A copy of a message with all that replaced."""
        copy = type(message)()
        copy.CopyFrom(message)
        self._settle(copy)
        return copy

    def _settle(self, message: Any) -> None:
        for descriptor, value in message.ListFields():
            name = descriptor.name
            if descriptor.message_type is not None:
                for part in value if hasattr(value, "append") else [value]:
                    self._settle(part)
            elif name in ("lease", "ID"):
                setattr(message, name, self.lease(value))
        for descriptor, value in message.ListFields():
            if descriptor.name == "key":
                message.key = self.key(value)
            elif descriptor.name == "keys" and hasattr(value, "append"):
                value[:] = sorted(map(self.key, value))


@dataclass(eq=False)
class Watched:
    """One watcher, as its client sees it."""

    request: rpc_pb2.WatchCreateRequest
    interest: Interest
    must_end: bool
    items: list[tuple[Any, ...]] = field(default_factory=list)
    events: int = 0
    is_ended: bool = False
    part: list[kv_pb2.Event] = field(default_factory=list)

    @property
    def is_due(self) -> bool:
        """Whether something that must come has not."""
        return not self.is_ended and (self.must_end or self.events < self.interest.expected)


class WatchSession:
    """One watch stream."""

    def __init__(self, side: Side, member: int) -> None:
        self.member = member
        self.stream = side.streams.open(WATCH, member)
        self.watchers: dict[int, Watched] = {}
        self.all: list[Watched] = []
        self.control: list[tuple[Any, ...]] = []
        self.awaited = 0
        self.asked_again = 0
        """Requests for progress that were sent again: their answers may come late, or never."""
        self.is_asking = False
        self._creating: list[tuple[rpc_pb2.WatchCreateRequest, bool]] = []
        self._read = 0
        self._side = side

    def create(self, request: rpc_pb2.WatchCreateRequest, must_end: bool) -> None:
        """Ask for a watcher; `must_end` if its start was compacted."""
        self._creating.append((request, must_end))
        self.awaited += 1
        self.stream.send(rpc_pb2.WatchRequest(create_request=request))

    def is_spent(self, watch_id: int) -> bool:
        """Whether a compaction ended a watcher of this id."""
        watched = self.watchers.get(watch_id)
        return watched is not None and watched.must_end

    def cancel(self, watch_id: int) -> None:
        """Ask for the end of a watcher."""
        watched = self.watchers.get(watch_id)
        if watched is not None and not watched.is_ended:
            self.awaited += 1
        self.stream.send(rpc_pb2.WatchRequest(cancel_request=rpc_pb2.WatchCancelRequest(watch_id=watch_id)))

    def take(self) -> None:
        """Take what came since the last time."""
        while self._read < len(self.stream.messages):
            self._take(self.stream.messages[self._read])
            self._read += 1

    def _take(self, message: rpc_pb2.WatchResponse) -> None:
        if message.created:
            self._created(message)
        elif message.watch_id == -1:
            if self.asked_again and not self.is_asking:
                self.asked_again -= 1  # the answer to a request that was sent again, though the first was only slow
            else:
                self.is_asking = False
                self.control.append(("progress", message.header.revision))
        elif message.canceled:
            self._canceled(message)
        else:
            self._events(message)

    def _created(self, message: rpc_pb2.WatchResponse) -> None:
        request, must_end = self._creating.pop(0)
        revision = message.header.revision
        self.control.append(("created", message.watch_id, revision, message.canceled, message.cancel_reason))
        if not message.canceled:
            interest = Interest.of(request, revision)
            self._side.mirror.follow(interest)
            watched = Watched(request, interest, must_end)
            self.watchers[message.watch_id] = watched
            self.all.append(watched)

    def _canceled(self, message: rpc_pb2.WatchResponse) -> None:
        item = ("canceled", message.header.revision, message.compact_revision, message.cancel_reason)
        watched = self.watchers[message.watch_id]
        watched.items.append(item)
        watched.is_ended = True
        if not message.compact_revision:
            self.control.append(("canceled", message.watch_id))

    def _events(self, message: rpc_pb2.WatchResponse) -> None:
        watched = self.watchers[message.watch_id]
        if watched.is_ended:
            watched.items.append(("events after the end",))
        if message.fragment and not watched.request.fragment:
            watched.items.append(("fragment that was not requested",))
        watched.part.extend(message.events)
        if not message.fragment:
            events, watched.part = watched.part, []
            self._revisions(watched, events, message.header.revision)

    def _revisions(self, watched: Watched, events: list[kv_pb2.Event], header_revision: int) -> None:
        watched.events += len(events)
        start = 0
        for end in range(1, len(events) + 1):
            revision = events[start].kv.mod_revision
            if end < len(events) and events[end].kv.mod_revision == revision:
                continue
            settled = tuple(self._side.names.settle(event).SerializeToString() for event in events[start:end])
            watched.items.append(("events", revision, settled))
            start = end
        if not events:
            watched.items.append(("progress", header_revision))
        elif header_revision < events[-1].kv.mod_revision:
            watched.items.append(("header before events", header_revision))

    @property
    def is_due(self) -> bool:
        """Whether something that must come has not."""
        return len(self.control) < self.awaited or any(watched.is_due for watched in self.all)


class Observed:
    """One observer of an election."""

    def __init__(self, side: Side, stream: Stream, prefix: bytes) -> None:
        self.stream = stream
        self.leaders = side.mirror.observe(prefix)
        self._side = side

    @property
    def is_due(self) -> bool:
        """Whether a leader is still to come."""
        return len(self.stream.messages) < len(self.leaders.seen)

    def items(self) -> list[tuple[Any, ...]]:
        """What came."""
        settle = self._side.names.settle
        return [(message.header.revision, settle(message.kv).SerializeToString()) for message in self.stream.messages]


class Side:
    """One cluster. `revision` is the highest that an answer named; `start` begins to mirror it."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.members = len(wire.endpoints)
        self.streams = Streams(wire)
        self.names = Names()
        self.mirror = Mirror(0)
        self.revision = 0
        self.sessions: dict[int, WatchSession] = {}
        self.observers: list[Observed] = []
        self._recorder: Stream | None = None
        self._recorded = 0

    def start(self, revision: int) -> None:
        """Forget what was, and mirror everything from this revision on, before which the store was empty."""
        self.stop()
        self.mirror = Mirror(revision - 1)
        self.names = Names()
        self.revision = revision
        self._recorded = 0
        self._recorder = self.streams.open(WATCH)
        create = rpc_pb2.WatchCreateRequest()
        create.CopyFrom(EVERYTHING)
        create.start_revision = revision
        self._recorder.send(rpc_pb2.WatchRequest(create_request=create))

    def stop(self) -> None:
        """Close all streams."""
        self.streams.close()
        self.sessions.clear()
        self.observers.clear()

    def call(self, method: str, request: Any, member: int) -> Answer:
        """Call, and note the revision."""
        answer = self.wire.call(method, request, member % self.members)
        self.revision = max(self.revision, answer.revision)
        return answer

    def refresh(self, member: int) -> None:
        """Have a member apply everything that was answered so far."""
        self.wire.call(RANGE, rpc_pb2.RangeRequest(key=b"\0"), member % self.members)

    def session(self, number: int) -> WatchSession:
        """The watch stream of this number; each is on a member of its own."""
        if number not in self.sessions:
            self.sessions[number] = WatchSession(self, number % self.members)
        return self.sessions[number]

    def close_session(self, number: int) -> None:
        """End a watch stream with all its watchers."""
        session = self.sessions.pop(number, None)
        if session is not None:
            session.stream.close()
            for watched in session.all:
                self.mirror.forget(watched.interest)

    def observe(self, name: bytes, member: int, request: Any) -> None:
        """Begin to observe an election."""
        stream = self.streams.open("v3electionpb.Election/Observe", member % self.members)
        stream.send(request)
        stream.half_close()
        self.observers.append(Observed(self, stream, name + b"/"))

    def take(self) -> None:
        """Take what came on all streams."""
        if self._recorder is not None:
            messages = self._recorder.messages
            while self._recorded < len(messages):
                self.mirror.take(list(messages[self._recorded].events))
                self._recorded += 1
        for session in self.sessions.values():
            session.take()

    @property
    def is_due(self) -> bool:
        """Whether something that must come, on any stream, has not."""
        self.take()
        if self.mirror.revision < self.revision:
            return True
        sessions = any(session.is_due for session in self.sessions.values())
        return sessions or any(observed.is_due for observed in self.observers)
