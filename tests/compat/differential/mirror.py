"""What one cluster's store holds and has held, as a watch of everything tells it, and what that lets others expect.

The differential test compares two clusters step by step, so it must know when a step is *over*: when every watcher,
observer and waiter has what it is to get. The mirror says so for each from the log of all events alone. It never says
what is right: that is the other cluster's part; a mirror that expects too much shows as a wait in vain.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from raftkv.pb import kv_pb2, rpc_pb2

DELETE = kv_pb2.Event.DELETE


@dataclass(eq=False)
class Interest:
    """What a watcher gets: an interval, the first revision, and filters."""

    key: bytes
    range_end: bytes
    start_revision: int
    no_put: bool = False
    no_delete: bool = False
    expected: int = 0

    def wants(self, event: kv_pb2.Event) -> bool:
        """Whether an event is for it."""
        filtered = self.no_delete if event.type == DELETE else self.no_put
        return event.kv.mod_revision >= self.start_revision and not filtered and self.contains(event.kv.key)

    def contains(self, key: bytes) -> bool:
        """Whether a key lies in the interval."""
        if not self.range_end:
            return key == self.key
        return self.key <= key and (self.range_end == b"\0" or key < self.range_end)

    @classmethod
    def of(cls, request: rpc_pb2.WatchCreateRequest, current_revision: int) -> Interest:
        """What a create request asks for."""
        create = rpc_pb2.WatchCreateRequest
        return cls(
            request.key or b"\0",
            request.range_end,
            request.start_revision or current_revision + 1,
            create.NOPUT in request.filters,
            create.NODELETE in request.filters,
        )


@dataclass(eq=False)
class LeaderHistory:
    """The leaders of an election, from the one that led when it began to be observed."""

    prefix: bytes
    seen: list[tuple[bytes, int]] = field(default_factory=list)
    last: tuple[bytes, int] | None = None

    def look(self, mirror: Mirror) -> None:
        """Take note of who leads now."""
        kv = mirror.oldest(self.prefix)
        leader = (kv.key, kv.mod_revision) if kv is not None else None
        if leader not in (None, self.last):
            self.seen.append(leader)
        self.last = leader


class Mirror:
    """The log of all events since the watch of everything began, and the state that follows from it."""

    def __init__(self, revision: int) -> None:
        self.revision = revision
        self.log: list[kv_pb2.Event] = []
        self.state: dict[bytes, kv_pb2.KeyValue] = {}
        self.interests: list[Interest] = []
        self.leader_histories: list[LeaderHistory] = []

    def take(self, events: list[kv_pb2.Event]) -> None:
        """Take the events of one response, which holds whole revisions."""
        for number, event in enumerate(events):
            self._take(event)
            is_last = number + 1 == len(events) or events[number + 1].kv.mod_revision != event.kv.mod_revision
            if is_last:
                self.revision = event.kv.mod_revision
                for leaders in self.leader_histories:
                    leaders.look(self)

    def _take(self, event: kv_pb2.Event) -> None:
        self.log.append(event)
        if event.type == DELETE:
            self.state.pop(event.kv.key, None)
        else:
            self.state[event.kv.key] = event.kv
        for interest in self.interests:
            interest.expected += interest.wants(event)

    def follow(self, interest: Interest) -> None:
        """Count what a watcher is to get, from the past and from now on."""
        interest.expected = sum(interest.wants(event) for event in self.log)
        self.interests.append(interest)

    def forget(self, interest: Interest) -> None:
        """Count for it no more."""
        self.interests.remove(interest)

    def observe(self, prefix: bytes) -> LeaderHistory:
        """Note every leader from now on."""
        leaders = LeaderHistory(prefix)
        leaders.look(self)
        self.leader_histories.append(leaders)
        return leaders

    def oldest(self, prefix: bytes) -> kv_pb2.KeyValue | None:
        """The key below a prefix that was created first."""
        below = (kv for key, kv in self.state.items() if key.startswith(prefix))
        return min(below, key=lambda kv: (kv.create_revision, kv.key), default=None)

    def create_revision(self, key: bytes) -> int:
        """When a key was created; 0 if it does not exist."""
        kv = self.state.get(key)
        return kv.create_revision if kv is not None else 0
