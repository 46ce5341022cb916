"""The vocabulary of watches: requests of watchers, the messages to them, and both as JSON.

A *watcher* wants the events of a range from some revision on. Because connections end, it uses several *streams*, each
starting where the one before stopped. Every message of every stream is recorded unmodified:

>>> sent = Message(at=5, kind="events", rev=2, events=(Event("put", KeyValue("k", "v", 2, 2, 1)),))
>>> stream = Stream("w1", 0, member=1, request=Watched("k"), call=3, messages=[Message(4, "created", 1), sent])
>>> Stream.from_json(stream.to_json()) == stream
True

This module also defines what a client may conclude from messages: when a fragmented response is complete, and where to
resume.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from jepsen.ops import KeyValue, decode, encode, is_in

Change = Literal["put", "delete"]
Kind = Literal["created", "events", "progress", "canceled"]


@dataclass(frozen=True, slots=True)
class Watched:
    """The request of a watcher: events of a key or of ``[key, end)`` from ``start`` on (0: from now).

    Attributes:
        previous: whether events contain the key that they replaced.
        without: kinds of events to leave out.
        fragment: whether large responses may be split.
    """

    key: str
    end: str = ""
    start: int = 0
    previous: bool = False
    without: tuple[Change, ...] = ()
    fragment: bool = False

    def wants(self, kind: Change, key: str) -> bool:
        """Return whether the request covers an event.

        Arguments:
            kind: put or delete.
            key: key of the event.
        """
        return is_in(key, self.key, self.end) and kind not in self.without


@dataclass(frozen=True, slots=True)
class Event:
    """One change; for a deletion, the key has neither a value nor a create revision."""

    kind: Change
    kv: KeyValue
    previous: KeyValue | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One message of the server: its time of arrival (ns), and the revision in its header.

    Attributes:
        fragment: whether the response continues in the next message.
        compact: compact revision, if the watcher was canceled because its start is compacted.
    """

    at: int
    kind: Kind
    rev: int
    events: tuple[Event, ...] = ()
    fragment: bool = False
    compact: int = 0
    reason: str = ""


@dataclass(slots=True)
class Stream:
    """One watcher on one stream to one member.

    Attributes:
        attempt: number of the stream among the watcher's streams.
        lasting: whether the watcher stays until the end of the run, where it must have received everything.
        lives: as in ``history.Operation``.
    """

    watcher: str
    attempt: int
    member: int
    request: Watched
    call: int
    messages: list[Message] = field(default_factory=list)
    lives: tuple[int, int] = (0, 0)
    ended: int = 0
    lasting: bool = True

    @property
    def name(self) -> str:
        """The name in reports."""
        return f"{self.watcher}.{self.attempt} on m{self.member}"

    @property
    def first(self) -> int:
        """The first revision that it must receive; 0: unknown, because it was not created."""
        created = next((message for message in self.messages if message.kind == "created"), None)
        if created is None:
            return 0
        return self.request.start or created.rev + 1

    @property
    def canceled(self) -> Message | None:
        """The cancellation, if there was one."""
        return next((message for message in self.messages if message.kind == "canceled"), None)

    def whole(self) -> Iterator[Message]:
        """Iterate over the messages, with fragmented responses joined; an incomplete response is left out."""
        parts: list[Event] = []
        for message in self.messages:
            parts += message.events
            if not message.fragment:
                yield replace(message, events=tuple(parts))
                parts = []

    def position(self) -> int:
        """Return the revision up to which everything was sent, by events, bookmarks or the requested start."""
        marks = [message for message in self.whole() if message.kind in ("events", "progress")]
        return max([self.first - 1, *(mark for message in marks for mark in _marks(message))], default=0)

    def next_start(self) -> int:
        """Return the start of this watcher's next stream; 0 if it starts from now and was never created."""
        canceled = self.canceled
        if canceled is not None and canceled.compact:
            return canceled.compact
        return self.position() + 1 if self.first else self.request.start

    def to_json(self) -> dict[str, Any]:
        """Return the stream as JSON data."""
        return {
            "watcher": self.watcher,
            "attempt": self.attempt,
            "member": self.member,
            "life": list(self.lives),
            "request": _fields(self.request),
            "call": self.call,
            "ended": self.ended,
            "lasting": self.lasting,
            "messages": [_message_to_json(message) for message in self.messages],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Stream:
        """Convert data from ``to_json`` back to a stream."""
        key, end, start, previous, without, fragment = data["request"]
        first_life, last_life = data["life"]
        return cls(
            data["watcher"],
            data["attempt"],
            data["member"],
            Watched(key, end, start, previous, tuple(without), fragment),
            data["call"],
            [_message_from_json(*message) for message in data["messages"]],
            (first_life, last_life),
            data["ended"],
            data["lasting"],
        )


def chains(streams: Iterable[Stream]) -> dict[str, list[Stream]]:
    """Return the streams of each watcher, in order."""
    found: dict[str, list[Stream]] = {}
    for stream in streams:
        found.setdefault(stream.watcher, []).append(stream)
    for chain in found.values():
        chain.sort(key=lambda stream: stream.attempt)
    return found


def _marks(message: Message) -> Iterator[int]:
    if message.kind == "progress":
        yield message.rev
    yield from (event.kv.mod for event in message.events)


def _fields(value: Any) -> list[Any]:
    return [encode(getattr(value, slot)) for slot in type(value).__slots__]


def _message_to_json(message: Message) -> list[Any]:
    events = [_fields(event) for event in message.events]
    return [message.at, message.kind, message.rev, events, message.fragment, message.compact, message.reason]


def _message_from_json(
    at: int, kind: Kind, rev: int, events: list[Any], fragment: bool, compact: int, reason: str
) -> Message:
    decoded = tuple(Event(change, decode(kv), decode(previous)) for change, kv, previous in events)
    return Message(at, kind, rev, decoded, fragment, compact, reason)
