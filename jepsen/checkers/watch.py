"""The watch checker: compares every stream with the replayed store, and streams of different members with each other.

    W1 ordered      revisions increase, and events within one are in the order of the writes
    W2 unique       no event twice
    W3 reliable     between the first requested and the last delivered revision, no event is missing or invented
    W4 atomic       a revision is not split over responses
    W5 resumable    a stream from a past revision begins with the first event from there on
    W6 bookmarkable a bookmark at r: all events up to r were sent before, none up to r is sent after
    W7 exact        the key, the filters, the fields, the previous value, created or not
    W8 start        no event from before the requested revision, no bookmark that would lead back before it
    W9 forward      the revision in headers never decreases, and is never below that of the response's events
    W10 no silence  canceled only because of an actual compaction; lasting watchers reach the end set for them
    W12 same        all members report the same for one key at one revision

The reference is ``replay.replayed``: the store as explained by requests and the final reading. W11 (memory) does not
show in a history. A violation names the watcher, its attempt and the member, as in ``w3.2 on m1``.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

from jepsen.checkers import Violation
from jepsen.checkers.model import Model
from jepsen.checkers.replay import replayed
from jepsen.history import History
from jepsen.ops import KeyValue
from jepsen.watches import Event, Message, Stream, chains

Mark = tuple[int, str]
"""The identity of an event: its revision and key."""


def check(history: History) -> list[Violation]:
    """Return all violations in the streams of a history."""
    truth = Truth.of(replayed(history).model, history)
    found: list[Violation] = []
    for stream in history.streams:
        found += _StreamCheck(stream, truth).run()
    found += _ended(history, truth)
    found += _members_agree(history.streams)
    if not history.streams:
        found.append(Violation("nothing watched", "there are no streams to check"))
    return found


@dataclass(slots=True)
class Truth:
    """The true events in order, and the times of requested compactions."""

    events: list[Event]
    compactions: list[tuple[int, int]]
    last: int

    @classmethod
    def of(cls, model: Model, history: History) -> Truth:
        """Return the truth of the replayed store.

        Arguments:
            model: the replayed store.
            history: history with the compactions.
        """
        events = [_event(rev, key, now, before) for rev, key, now, before in model.log]
        compactions = [(event["at"], event["rev"]) for event in history.events if event["event"] == "compacting"]
        return cls(events, compactions, history.store.last if history.store else 0)

    def between(self, first: int, last: int) -> list[Event]:
        """Return the events in a range of revisions.

        Arguments:
            first, last: bounds, inclusive.
        """
        start = bisect_left(self.events, first, key=lambda event: event.kv.mod)
        return self.events[start : bisect_right(self.events, last, key=lambda event: event.kv.mod)]

    def compacted(self, at: int) -> int:
        """Return the highest revision that may have been compacted by a time (ns)."""
        return max((rev for when, rev in self.compactions if when <= at), default=0)


def _event(rev: int, key: str, now: KeyValue | None, before: KeyValue | None) -> Event:
    if now is None:
        return Event("delete", KeyValue(key, "", 0, rev, 0), before)
    return Event("put", now, before)


class _StreamCheck:
    """The check of one stream against the truth."""

    def __init__(self, stream: Stream, truth: Truth) -> None:
        self._stream, self._truth = stream, truth
        self._found: list[Violation] = []

    def run(self) -> list[Violation]:
        """Check the stream."""
        if self._stream.first:
            self._check_headers()
            self._check_order()
            self._check_start()
            self._check_bookmarks()
            self._check_content()
        return self._found

    def _report(self, rule: str, text: str) -> None:
        self._found.append(Violation(rule, f"{self._stream.name}: {text}"))

    def _check_headers(self) -> None:
        highest = 0
        for message in self._stream.messages:
            if message.kind not in ("events", "progress"):
                continue
            if message.rev < highest:
                self._report("W9 went back", f"header {message.rev} after {highest}")
            highest = max(highest, message.rev)
            ahead = [event.kv.mod for event in message.events if event.kv.mod > message.rev]
            if ahead:
                self._report("W9 header behind", f"event of {ahead[0]} under header {message.rev}")

    def _check_order(self) -> None:
        seen: set[Mark] = set()
        last = 0
        for message in self._stream.whole():
            revisions = [event.kv.mod for event in message.events]
            if revisions and revisions[0] == last:
                self._report("W4 split", f"revision {last} goes on in the next response")
            for event in message.events:
                mark = (event.kv.mod, event.kv.key)
                if mark in seen:
                    self._report("W2 twice", f"{event.kind} of {event.kv.key} at {event.kv.mod}")
                elif event.kv.mod < last:
                    self._report("W1 out of order", f"{event.kv.key} at {event.kv.mod} after {last}")
                seen.add(mark)
                last = max(last, event.kv.mod)

    def _check_start(self) -> None:
        first = self._stream.first
        for message in self._stream.whole():
            for event in message.events:
                if event.kv.mod < first:
                    self._report("W8 before start", f"{event.kv.key} at {event.kv.mod}, asked for from {first}")
            if message.kind == "progress" and message.rev < first - 1 and self._stream.request.start:
                self._report("W8 bookmark before start", f"at {message.rev}, asked for from {first}")

    def _check_bookmarks(self) -> None:
        wanted = self._wanted(self._truth.last)
        sent: set[Mark] = set()
        marked = place = 0
        for message in self._stream.whole():
            late = [event.kv.mod for event in message.events if event.kv.mod <= marked]
            if late:
                self._report("W6 event after bookmark", f"revision {late[0]} after a bookmark at {marked}")
            sent |= {_mark(event) for event in message.events}
            if message.kind == "progress" and message.rev > marked:
                marked = message.rev
                due = place
                while due < len(wanted) and wanted[due].kv.mod <= marked:
                    due += 1
                missing = [event for event in wanted[place:due] if _mark(event) not in sent]
                place = due
                if missing:
                    self._report("W6 bookmark ahead", f"at {marked}, without {_show(missing)}")

    def _wanted(self, last: int) -> list[Event]:
        first, request = self._stream.first, self._stream.request
        return [event for event in self._truth.between(first, last) if request.wants(event.kind, event.kv.key)]

    def _check_content(self) -> None:
        sent = [(message, event) for message in self._stream.whole() for event in message.events]
        delivered = max((event.kv.mod for _, event in sent), default=0)
        wanted = self._wanted(delivered)
        true = {_mark(event): event for event in wanted}
        for message, event in sent:
            self._check_event(message, event, true.get(_mark(event)))
        marks = [_mark(event) for _, event in sent]
        missing = [event for event in wanted if _mark(event) not in set(marks)]
        self._report_missing(missing, marks)
        positions = {mark: place for place, mark in enumerate(true)}
        in_order = [mark for mark in marks if mark in positions]
        # W1 covers the order between revisions; this is the order inside one revision.
        for before, after in pairwise(in_order):
            if before[0] == after[0] and positions[before] > positions[after]:
                self._report("W1 out of order", f"{after[1]} after {before[1]} in revision {after[0]}")

    def _report_missing(self, missing: list[Event], marks: list[Mark]) -> None:
        if not missing:
            return
        at_start = [event for event in missing if event.kv.mod <= min(rev for rev, _ in marks)]
        if at_start and self._stream.request.start:
            self._report("W5 lost at start", f"from {self._stream.first}: {_show(at_start)}")
        if len(at_start) < len(missing) or not self._stream.request.start:
            self._report("W3 missing", _show(missing))

    def _check_event(self, message: Message, event: Event, true: Event | None) -> None:
        request = self._stream.request
        if not request.wants(event.kind, event.kv.key):
            self._report("W7 not asked for", f"{event.kind} of {event.kv.key} at {event.kv.mod}")
        elif event.kv.mod >= self._stream.first and (true is None or true.kind != event.kind):
            self._report("W3 invented", f"{event.kind} of {event.kv.key} at {event.kv.mod}")
        elif true is not None and true.kv != event.kv:
            self._report("W7 wrong fields", f"{event.kv}, should be {true.kv}")
        elif true is not None:
            self._check_previous(message, event, true)

    def _check_previous(self, message: Message, event: Event, true: Event) -> None:
        expected = true.previous if self._stream.request.previous else None
        forgotten = event.previous is None and event.kv.mod - 1 < self._truth.compacted(message.at)
        if event.previous != expected and not forgotten:
            text = f"{event.kv.key} at {event.kv.mod}: {event.previous}, should be {expected}"
            self._report("W7 wrong previous", text)


def _ended(history: History, truth: Truth) -> list[Violation]:
    """Check that cancellations had a reason, and that lasting watchers got all events up to the last revision."""
    found, end = [], _end(history, truth)
    for watcher, chain in chains(history.streams).items():
        for stream in chain:
            message = stream.canceled
            if message is not None and not _justified(stream, message, truth):
                text = (
                    f"{stream.name}: {message.reason or 'compacted'} {message.compact}, needs {stream.position() + 1}"
                )
                found.append(Violation("W10 canceled", text))
        last = chain[-1]
        if last.lasting and not (last.first and last.position() >= end):
            text = f"{watcher} is at {last.position()} after {last.name}, it has to reach {end}"
            found.append(Violation("W10 never caught up", text))
    return found


def _end(history: History, truth: Truth) -> int:
    """Return the revision that lasting watchers had to reach before they might end.

    The store may have later revisions, because a write whose client has given up can be applied at any later time.
    """
    endings = [event["rev"] for event in history.events if event["event"] == "ending"]
    return int(endings[-1]) if endings else truth.last


def _justified(stream: Stream, message: Message, truth: Truth) -> bool:
    needed = stream.position() + 1 if stream.first else stream.request.start
    return needed < message.compact <= truth.compacted(message.at)


def _members_agree(streams: list[Stream]) -> list[Violation]:
    """Check W12, without using the truth."""
    said: dict[Mark, dict[Event, Stream]] = defaultdict(dict)
    for stream in streams:
        for message in stream.messages:
            for event in message.events:
                said[_mark(event)].setdefault(Event(event.kind, event.kv), stream)
    found = []
    for (rev, key), versions in said.items():
        if len(versions) > 1:
            who = ", ".join(sorted(stream.name for stream in versions.values()))
            found.append(Violation("W12 members differ", f"{key} at {rev}: {who}"))
    return found


def _mark(event: Event) -> Mark:
    return event.kv.mod, event.kv.key


def _show(events: list[Event]) -> str:
    listed = ", ".join(f"{event.kind} of {event.kv.key} at {event.kv.mod}" for event in events[:3])
    return listed + (f" and {len(events) - 3} more" if len(events) > 3 else "")
