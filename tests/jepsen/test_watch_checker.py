"""The watch checker: correct streams pass, and each guarantee, broken in at least two ways, is flagged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jepsen.checkers import watch
from jepsen.history import History, load, save
from jepsen.ops import KeyValue
from jepsen.watches import Event, Message, Stream, Watched
from tests.jepsen.story import Delete, Put, Story, Txn

A2, A3, D4, B5, X6, Y6, A7 = 2, 3, 4, 5, 6, 6, 7
LAST = 7


def truth() -> Story:
    """a at 2 and 3, deleted at 4, b at 5, x and y together at 6, a again at 7."""
    both = Txn((), (Put("x", "x1"), Put("y", "y1")))
    story = Story(Put("a", "1"), Put("a", "2"), Delete("a"), Put("b", "1"), both, Put("a", "3"))
    for rev in range(2, LAST + 1):
        story.write(rev, 10 * rev, 10 * rev + 5)
    return story


PUT_2 = Event("put", KeyValue("a", "1", 2, 2, 1))
PUT_3 = Event("put", KeyValue("a", "2", 2, 3, 2), PUT_2.kv)
DELETE_4 = Event("delete", KeyValue("a", "", 0, 4, 0), PUT_3.kv)
PUT_5 = Event("put", KeyValue("b", "1", 5, 5, 1))
PUT_X = Event("put", KeyValue("x", "x1", 6, 6, 1))
PUT_Y = Event("put", KeyValue("y", "y1", 6, 6, 1))
PUT_7 = Event("put", KeyValue("a", "3", 7, 7, 1))
EVENTS = (PUT_2, PUT_3, DELETE_4, PUT_5, PUT_X, PUT_Y, PUT_7)


def bare(event: Event) -> Event:
    """Without the previous value."""
    return dataclasses.replace(event, previous=None)


def sent(*events: Event, rev: int = 0, at: int = 100, fragment: bool = False) -> Message:
    """A response with events, as without prev_kv."""
    plain = tuple(bare(event) for event in events)
    return Message(at, "events", rev or events[-1].kv.mod, plain, fragment)


def full(*events: Event, at: int = 100) -> Message:
    """A response with events and previous values."""
    return Message(at, "events", events[-1].kv.mod, events)


def created(rev: int = 1) -> Message:
    """The first response."""
    return Message(50, "created", rev)


def mark(rev: int) -> Message:
    """A bookmark."""
    return Message(100, "progress", rev)


def cancel(compact: int, reason: str = "") -> Message:
    """The end of a watcher."""
    return Message(100, "canceled", 0, (), False, compact, reason)


def stream(
    *messages: Message,
    start: int = 2,
    wanted: Watched | None = None,
    first: Message | None = None,
    member: int = 1,
    attempt: int = 0,
    lasting: bool = False,
) -> Stream:
    """A watcher, by default of all keys."""
    request = dataclasses.replace(wanted or Watched("\0", "\0"), start=start)
    whole = [first or created(), *messages]
    return Stream("w", attempt, member, request, 40, whole, (1, 1), 200, lasting)


ALL = (*tuple(sent(event) for event in EVENTS[:4]), sent(PUT_X, PUT_Y), sent(PUT_7))
"""Every revision in a response of its own."""


def history(*streams: Stream, compacting: int = 0, ending: int = 0) -> History:
    """The true story, watched; at the end watchers had to reach `ending`, if that is given."""
    run = truth().history()
    if compacting:
        run.events.append({"event": "compacting", "at": 60, "rev": compacting})
    if ending:
        run.events.append({"event": "ending", "at": 70, "rev": ending})
    run.streams = list(streams)
    return run


PREVIOUS = Watched("\0", "\0", previous=True)
GOOD: dict[str, History] = {
    "one revision a response": history(stream(*ALL)),
    "all in one response": history(stream(sent(*EVENTS))),
    "to the end": history(stream(*ALL, lasting=True)),
    "to the end set for it": history(stream(*ALL[:3], lasting=True), ending=4),
    "breaks off": history(stream(*ALL[:2])),
    "never created": history(dataclasses.replace(stream(), messages=[])),
    "from now": history(stream(*ALL[3:], start=0, first=created(4))),
    "from the past": history(stream(*ALL[2:], start=4, first=created(7))),
    "from the future": history(stream(ALL[-1], start=7, first=created(3))),
    "one key": history(stream(sent(PUT_5), wanted=Watched("b"), lasting=False)),
    "a part": history(stream(sent(PUT_X, PUT_Y), wanted=Watched("x", "z"))),
    "no puts": history(stream(sent(DELETE_4), wanted=Watched("\0", "\0", without=("put",)))),
    "no deletes": history(stream(sent(*EVENTS[:2], *EVENTS[3:]), wanted=Watched("\0", "\0", without=("delete",)))),
    "previous values": history(stream(full(*EVENTS), wanted=PREVIOUS)),
    "previous value compacted": history(stream(sent(PUT_3), full(*EVENTS[2:]), start=3, wanted=PREVIOUS), compacting=3),
    "fragments": history(stream(*ALL[:4], sent(PUT_X, fragment=True), sent(PUT_Y), ALL[5])),
    "broken off in fragments": history(stream(*ALL[:4], sent(PUT_X, fragment=True))),
    "bookmarks": history(stream(ALL[0], mark(2), sent(PUT_3, DELETE_4), mark(4), mark(4), *ALL[3:], mark(7))),
    "bookmark without events": history(stream(mark(6), start=6, wanted=Watched("b"))),
    "bookmark is the end": history(stream(sent(PUT_5), mark(7), wanted=Watched("b"), lasting=True)),
    "resumed after an event": history(
        stream(*ALL[:3], lasting=True), stream(*ALL[3:], start=5, attempt=1, member=2, lasting=True)
    ),
    "resumed after a bookmark": history(
        stream(sent(PUT_5), mark(6), wanted=Watched("b"), lasting=True),
        stream(mark(7), start=7, attempt=1, wanted=Watched("b"), lasting=True),
    ),
    "canceled for a compaction": history(
        stream(cancel(5), lasting=True), stream(*ALL[3:], start=5, attempt=1, lasting=True), compacting=5
    ),
    "catching up under a later header": history(stream(sent(PUT_2, PUT_3, rev=6), sent(DELETE_4, rev=6))),
}


@pytest.mark.parametrize("good", GOOD.values(), ids=GOOD)
def test_good_streams_pass(good: History) -> None:
    assert watch.check(good) == []


WRONG_VALUE = dataclasses.replace(PUT_3, kv=dataclasses.replace(PUT_3.kv, value="z"))
NOT_CREATED = dataclasses.replace(PUT_7, kv=KeyValue("a", "3", 2, 7, 3))
BAD: dict[str, tuple[History, str]] = {
    "older revision later": (history(stream(ALL[0], ALL[2], ALL[1])), "W1 out of order"),
    "older revision in a response": (history(stream(sent(PUT_2, DELETE_4, PUT_3, rev=4))), "W1 out of order"),
    "order inside a txn": (history(stream(*ALL[:4], sent(PUT_Y, PUT_X))), "W1 out of order"),
    "twice": (history(stream(ALL[0], ALL[1], ALL[1])), "W2 twice"),
    "twice in a response": (history(stream(sent(PUT_2, PUT_2))), "W2 twice"),
    "again from the start": (history(stream(*ALL, *ALL)), "W2 twice"),
    "one missing": (history(stream(*ALL[:2], *ALL[3:])), "W3 missing"),
    "half a txn missing": (history(stream(*ALL[:4], sent(PUT_X), ALL[5])), "W3 missing"),
    "missing after now": (history(stream(*ALL[4:], start=0, first=created(4))), "W3 missing"),
    "invented": (history(stream(ALL[0], sent(Event("put", KeyValue("q", "1", 3, 3, 1))))), "W3 invented"),
    "deleted, it says": (history(stream(ALL[0], sent(Event("delete", KeyValue("a", "", 0, 3, 0))))), "W3 invented"),
    "beyond the end": (history(stream(*ALL, sent(Event("put", KeyValue("a", "4", 7, 8, 2))))), "W3 invented"),
    "txn split": (history(stream(*ALL[:4], sent(PUT_X), sent(PUT_Y))), "W4 split"),
    "txn split with company": (history(stream(*ALL[:3], sent(PUT_5, PUT_X), sent(PUT_Y, PUT_7))), "W4 split"),
    "first event lost": (history(stream(*ALL[3:], start=4, first=created(7))), "W5 lost at start"),
    "first events lost on resuming": (
        history(stream(*ALL[:2]), stream(*ALL[4:], start=4, attempt=1, member=2)),
        "W5 lost at start",
    ),
    "bookmark too high": (history(stream(ALL[0], mark(3))), "W6 bookmark ahead"),
    "bookmark instead of events": (history(stream(mark(7))), "W6 bookmark ahead"),
    "event after its bookmark": (history(stream(ALL[0], mark(3), sent(PUT_3, rev=3))), "W6 event after bookmark"),
    "events after a bookmark": (history(stream(mark(4), sent(*EVENTS))), "W6 event after bookmark"),
    "filtered kind": (history(stream(*ALL[:3], wanted=Watched("a", without=("delete",)))), "W7 not asked for"),
    "foreign key": (history(stream(ALL[3], wanted=Watched("a"))), "W7 not asked for"),
    "end of the interval": (history(stream(sent(PUT_Y), wanted=Watched("x", "y"))), "W7 not asked for"),
    "wrong value": (history(stream(ALL[0], sent(WRONG_VALUE))), "W7 wrong fields"),
    "created again, not said": (history(stream(*ALL[:5], sent(NOT_CREATED))), "W7 wrong fields"),
    "previous not asked for": (history(stream(full(PUT_2, PUT_3))), "W7 wrong previous"),
    "previous missing": (history(stream(sent(PUT_2, PUT_3), wanted=PREVIOUS)), "W7 wrong previous"),
    "previous of another": (
        history(stream(full(PUT_2, PUT_3, Event("delete", DELETE_4.kv, PUT_2.kv)), wanted=PREVIOUS)),
        "W7 wrong previous",
    ),
    "previous of something new": (
        history(stream(*ALL[:5], full(Event("put", PUT_7.kv, PUT_3.kv)), wanted=PREVIOUS)),
        "W7 wrong previous",
    ),
    "previous forgotten too early": (
        history(stream(sent(PUT_2, PUT_3), wanted=PREVIOUS), compacting=2),
        "W7 wrong previous",
    ),
    "from before the start": (history(stream(*ALL[1:], start=4, first=created(7))), "W8 before start"),
    "future watcher sent the past": (history(stream(*ALL[4:], start=7, first=created(3))), "W8 before start"),
    "future watcher given a bookmark": (history(stream(mark(3), start=7)), "W8 bookmark before start"),
    "bookmark would lead back": (history(stream(mark(2), ALL[4], start=6)), "W8 bookmark before start"),
    "header goes back": (history(stream(sent(PUT_2, rev=6), sent(PUT_3, rev=5))), "W9 went back"),
    "bookmark goes back": (history(stream(*ALL[:3], mark(3))), "W9 went back"),
    "header behind its events": (history(stream(sent(PUT_2, rev=1))), "W9 header behind"),
    "header behind one event": (history(stream(sent(PUT_2, PUT_3, rev=2))), "W9 header behind"),
    "canceled for nothing": (history(stream(cancel(5))), "W10 canceled"),
    "canceled by a later compaction": (
        history(
            dataclasses.replace(stream(cancel(5)), messages=[created(), Message(55, "canceled", 0, (), False, 5)]),
            compacting=5,
        ),
        "W10 canceled",
    ),
    "canceled though it needs no past": (history(stream(*ALL, cancel(7)), compacting=7), "W10 canceled"),
    "canceled with a reason": (history(stream(cancel(0, "etcdserver: watch canceled"))), "W10 canceled"),
    "silent at the end": (history(stream(*ALL[:3], lasting=True)), "W10 never caught up"),
    "silent before the end set for it": (history(stream(*ALL[:2], lasting=True), ending=4), "W10 never caught up"),
    "not resumed": (history(dataclasses.replace(stream(lasting=True), messages=[])), "W10 never caught up"),
    "members differ": (
        history(stream(ALL[0], ALL[1]), stream(ALL[0], sent(WRONG_VALUE), member=2)),
        "W12 members differ",
    ),
    "members differ on what happened": (
        history(stream(ALL[0], ALL[1]), stream(ALL[0], sent(Event("delete", KeyValue("a", "", 0, 3, 0))), member=2)),
        "W12 members differ",
    ),
    "no watch": (history(), "nothing watched"),
}


@pytest.mark.parametrize(("bad", "rule"), BAD.values(), ids=BAD)
def test_bad_streams_are_flagged(bad: History, rule: str) -> None:
    assert rule in {violation.rule for violation in watch.check(bad)}


def test_every_guarantee_is_broken_at_least_twice() -> None:
    flagged = [rule.split()[0] for _, rule in BAD.values()]
    assert {f"W{n}": flagged.count(f"W{n}") >= 2 for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12)} == {
        f"W{n}": True for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12)
    }


def _drop(messages: list[Message], place: int) -> list[Message]:
    return messages[:place] + messages[place + 1 :]


def _repeat(messages: list[Message], place: int) -> list[Message]:
    return [*messages[: place + 1], *messages[place:]]


def _swap(messages: list[Message], place: int) -> list[Message]:
    return [*messages[:place], messages[place + 1], messages[place], *messages[place + 2 :]]


def _falsified() -> Iterator[tuple[Callable[[list[Message], int], list[Message]], int]]:
    for falsify in (_drop, _repeat, _swap):
        yield from ((falsify, place) for place in range(len(ALL) - 1))


@pytest.mark.parametrize(("falsify", "place"), list(_falsified()))
def test_any_response_dropped_repeated_or_swapped_is_flagged(falsify, place):
    assert watch.check(history(stream(*falsify(list(ALL), place))))


@pytest.mark.parametrize(
    ("stream_before", "start"),
    [
        (stream(*ALL[:3]), 5),
        (stream(*ALL[:3], mark(6)), 7),
        (stream(*ALL[:4], sent(PUT_X, fragment=True)), 6),
        (stream(start=0, first=created(4)), 5),
        (stream(cancel(5)), 5),
        (dataclasses.replace(stream(start=0), messages=[]), 0),
        (dataclasses.replace(stream(start=3), messages=[]), 3),
        (stream(mark(3), start=7), 7),
    ],
)
def test_watcher_resume_revision(stream_before: Stream, start: int) -> None:
    assert stream_before.next_start() == start


def test_streams_survive_their_file(tmp_path: Path) -> None:
    before = history(stream(full(PUT_2, PUT_3), mark(3), cancel(5, "why"), wanted=Watched("a", "z", previous=True)))
    save(before, tmp_path / "history.jsonl")
    assert load(tmp_path / "history.jsonl").streams == before.streams
