"""The history checkers: correct histories pass, wrong ones are flagged by the right rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jepsen.checkers import linear, logs, members, replay, sets
from jepsen.history import Change, History, Operation, load, save
from jepsen.ops import PutResult, RangeResult
from tests.jepsen.story import Compare, Delete, DeleteResult, Put, Range, Story, Txn, TxnResult, found, kv, swap


def three() -> Story:
    """Three puts to one key, at revisions 2, 3 and 4."""
    return Story(Put("k", "a"), Put("k", "b"), Put("k", "c"))


def two_keys() -> Story:
    """A txn that writes two keys at once, then one of them again."""
    both = Txn((), (Put("x", "x1"), Put("y", "y1")))
    return Story(both, Put("x", "x2"))


def silent_loss() -> Story:
    """A write acknowledged at revision 3, while the store ends at 2."""
    story = Story(Put("k", "a")).write(2, 0, 10)
    return story.answered(Put("k", "b"), PutResult(), 3, 20, 30).read("k", 2, 40, 50)


def twice() -> Story:
    """One put that is in the store twice."""
    return Story(Put("k", "a"), Put("k", "b"), Put("k", "a")).write(2, 0, 10).write(3, 20, 30)


def unread() -> Story:
    """A revision that could not be read back."""
    story = three().write(2, 0, 1).write(3, 2, 3).write(4, 4, 5)
    del story.store.changes[3]
    return story


def state_differs() -> Story:
    """Correct changes, but the whole state shows another key."""
    story = Story(Put("k", "a")).write(2, 0, 10)
    story.store.states[2] = (kv("k", "a", 2), kv("ghost", "g", 2))
    return story


def torn() -> Story:
    """A txn of two keys of which the store kept one."""
    story = Story(Txn((), (Put("x", "1"), Put("y", "2")))).write(2, 0, 10)
    story.store.changes[2] = Change((kv("x", "1", 2),))
    return story


BAD_REPLAY = {
    "acknowledged write beyond the end": (silent_loss(), "lost write"),
    "acknowledged write replaced": (
        Story(Put("k", "other")).answered(Put("k", "a"), PutResult(), 2, 0, 10).lost(Put("k", "other"), 0, 10),
        "wrong write",
    ),
    "two acknowledgements of one revision": (
        Story(Put("k", "a")).write(2, 0, 10).answered(Put("j", "b"), PutResult(), 2, 20, 30),
        "duplicate revision",
    ),
    "applied twice": (twice(), "applied twice"),
    "lost put applied twice": (Story(Put("k", "a"), Put("k", "a")).lost(Put("k", "a"), 0, 10), "applied twice"),
    "write without a client": (Story(Put("k", "a")).read("k", 2, 0, 10), "phantom write"),
    "delete without a client": (Story(Put("k", "a"), Delete("k")).write(2, 0, 10), "phantom write"),
    "lost delete of another key": (
        Story(Put("k", "a"), Delete("k")).write(2, 0, 10).lost(Delete("j"), 20, 30),
        "phantom write",
    ),
    "refused and yet done": (Story(Put("k", "a")).refused(Put("k", "a"), 0, 10), "refused but done"),
    "read of an old value": (three().write(2, 0, 1).write(3, 2, 3).write(4, 4, 5).read("k", 3, 6, 7), "real time"),
    "read of a future value": (Story(Put("k", "a")).read("k", 2, 0, 10).write(2, 20, 30), "real time"),
    "stale read of a future value": (Story(Put("k", "a")).stale("k", 2, 0, 10).write(2, 20, 30), "real time"),
    "revisions against real time": (Story(Put("k", "a"), Put("k", "b")).write(3, 0, 10).write(2, 20, 30), "real time"),
    "lost put from the future": (Story(Put("k", "a")).read("k", 2, 0, 10).lost(Put("k", "a"), 20, 30), "real time"),
    "wrong value": (
        Story(Put("k", "a")).write(2, 0, 10).read("k", 2, 20, 30, result=found(kv("k", "z", 2))),
        "wrong read",
    ),
    "missing key": (Story(Put("k", "a")).write(2, 0, 10).read("k", 2, 20, 30, result=found()), "wrong read"),
    "wrong create revision": (
        three().write(2, 0, 1).write(3, 2, 3).write(4, 4, 5).read("k", 4, 6, 7, result=found(kv("k", "c", 4, 3, 3))),
        "wrong read",
    ),
    "wrong version": (
        three().write(2, 0, 1).write(3, 2, 3).write(4, 4, 5).read("k", 4, 6, 7, result=found(kv("k", "c", 4, 2, 2))),
        "wrong read",
    ),
    "wrong past": (
        three()
        .write(2, 0, 1)
        .write(3, 2, 3)
        .write(4, 4, 5)
        .answered(Range("k", rev=2), found(kv("k", "c", 4, 2, 3)), 4, 6, 7),
        "wrong read",
    ),
    "stale read that never was": (
        Story(Put("k", "a")).write(2, 0, 1).stale("k", 2, 2, 3, result=found(kv("k", "z", 2))),
        "wrong read",
    ),
    "half a txn seen": (
        two_keys().write(2, 0, 10).write(3, 20, 30).list("x", "z", 2, 12, 15, result=found(kv("x", "x1", 2))),
        "wrong read",
    ),
    "half a txn kept": (torn(), "wrong write"),
    "failed swap that should hold": (
        Story(Put("k", "a"))
        .write(2, 0, 10)
        .answered(swap("k", "a", "b"), TxnResult(False, (found(kv("k", "a", 2)),)), 2, 20, 30),
        "wrong read",
    ),
    "swap that should fail": (
        Story(Put("k", "a"), Put("k", "b"))
        .write(2, 0, 10)
        .answered(swap("k", "z", "b"), TxnResult(True, (found(kv("k", "a", 2)), PutResult())), 3, 20, 30),
        "wrong answer",
    ),
    "wrong previous value": (
        Story(Put("k", "a"), Put("k", "b", previous=True))
        .write(2, 0, 10)
        .write(3, 20, 30, result=PutResult(kv("k", "z", 2))),
        "wrong answer",
    ),
    "wrong count of deleted": (
        Story(Put("k", "a"), Delete("k")).write(2, 0, 10).write(3, 20, 30, result=DeleteResult(2)),
        "wrong answer",
    ),
    "deleted nothing, says the answer": (
        Story(Put("k", "a")).write(2, 0, 10).answered(Delete("k"), DeleteResult(0), 2, 20, 30),
        "wrong read",
    ),
    "answer from beyond the end": (Story().answered(Range("k"), found(), 5, 0, 10), "lost revision"),
    "revision not read back": (unread(), "unreadable"),
    "a key out of nowhere": (state_differs(), "wrong state"),
}


@pytest.mark.parametrize(("story", "rule"), BAD_REPLAY.values(), ids=BAD_REPLAY)
def test_replay_flags(story: Story, rule: str) -> None:
    assert rule in {violation.rule for violation in replay.check(story.history())}


def test_replay_does_not_pass_a_history_without_a_store() -> None:
    assert [violation.rule for violation in replay.check(History([]))] == ["unreadable"]


def value(text: str) -> RangeResult:
    """An answer of which the search uses only the value."""
    return found(kv("k", text, 0))


BAD_LINEAR = {
    "read of an old value": three().write(2, 0, 1).write(3, 2, 3).read("k", 2, 4, 5),
    "read of a future value": Story(Put("k", "a")).read("k", 2, 0, 1).write(2, 2, 3),
    "read of nothing after put": Story(Put("k", "a")).write(2, 0, 1).read("k", 1, 2, 3),
    "value without a writer": Story(Put("k", "a")).write(2, 0, 1).answered(Range("k"), value("z"), 2, 2, 3),
    "new, then old again": three().write(2, 0, 1).write(3, 2, 90).read("k", 3, 10, 20).read("k", 2, 30, 40),
    "two readers disagree on order": three()
    .write(2, 0, 90)
    .write(3, 0, 90)
    .answered(Range("k"), value("a"), 0, 91, 92)
    .answered(Range("k"), value("b"), 0, 93, 94),
    "two swaps from one value": Story(Put("k", "a"), swap("k", "a", "b"), swap("k", "b", "c"))
    .write(2, 0, 1)
    .write(3, 10, 20)
    .answered(swap("k", "a", "c"), TxnResult(True, (value("a"), PutResult())), 4, 10, 20),
    "swap failed on its own value": Story(Put("k", "a"))
    .write(2, 0, 1)
    .answered(swap("k", "a", "b"), TxnResult(False, (value("a"),)), 2, 2, 3),
    "lost put vanishes after it was seen": Story(Put("k", "a"))
    .lost(Put("k", "a"), 0, 1)
    .read("k", 2, 2, 3)
    .read("k", 1, 4, 5),
    "lost put seen before its call": Story(Put("k", "a")).read("k", 2, 0, 1).lost(Put("k", "a"), 2, 3),
    "refused put seen": Story().refused(Put("k", "a"), 0, 1).answered(Range("k"), value("a"), 2, 2, 3),
    "delete did nothing": Story(Put("k", "a"), Delete("k")).write(2, 0, 1).write(3, 2, 3).read("k", 2, 4, 5),
    "delete of what is not there": Story().answered(Delete("k"), DeleteResult(1), 2, 0, 1),
    "wrong previous value": Story(Put("k", "a"), Put("k", "b", previous=True))
    .write(2, 0, 1)
    .write(3, 2, 3, result=PutResult(kv("k", "z", 2))),
    "failed blind guard": Story(Put("k", "a"))
    .write(2, 0, 1)
    .answered(Txn((Compare("k", "value", "=", "a"),), (Put("k", "b"),)), TxnResult(False, ()), 2, 2, 3),
}


@pytest.mark.parametrize("story", BAD_LINEAR.values(), ids=BAD_LINEAR)
def test_search_flags_without_looking_at_revisions(story: Story) -> None:
    assert [violation.rule for violation in linear.check(story.history())] == ["not linearizable"]


def test_search_out_of_steps_is_a_violation() -> None:
    story = three().write(2, 0, 90).write(3, 0, 90).write(4, 0, 90).read("k", 4, 91, 92)
    assert linear.check(story.history()) == []
    assert [violation.rule for violation in linear.check(story.history(), steps_max=2)] == ["undecided"]


def test_an_unseen_lost_put_may_explain_a_blind_failure() -> None:
    guarded = Txn((Compare("k", "value", "=", "a"),), (Put("k", "b"),))
    story = Story(Put("k", "a"), Put("k", "lost"))
    story.write(2, 0, 1).lost(Put("k", "lost"), 2, 3).answered(guarded, TxnResult(False, ()), 3, 4, 5)
    assert linear.check(story.history()) == []


def test_lost_puts_of_one_value_are_not_left_out() -> None:
    story = Story(Put("k", "a")).lost(Put("k", "a"), 0, 1).lost(Put("k", "a"), 0, 1).read("k", 2, 2, 3)
    assert linear.check(story.history()) == []


def test_an_unseen_lost_put_may_explain_a_lost_swap_that_was_seen() -> None:
    story = Story(Put("k", "a"), swap("k", "a", "b")).lost(Put("k", "a"), 0, 1).lost(swap("k", "a", "b"), 2, 3)
    assert linear.check(story.read("k", 3, 4, 5).history()) == []
    existing = Txn((Compare("k", "version", ">", 0),), (Put("k", "c"),), (Range("k"),))
    story = Story(Put("k", "a"), existing).lost(Put("k", "a"), 0, 1).lost(existing, 2, 3)
    assert linear.check(story.read("k", 3, 4, 5).history()) == []


def added(number: int, kind: str = "ok") -> Operation:
    """The put of one element of a set."""
    story = Story()
    request = Put(f"s/{number}", str(number))
    if kind == "ok":
        story.answered(request, PutResult(), number + 2, number, number + 1)
    else:
        (story.lost if kind == "info" else story.refused)(request, number, number + 1)
    return story.operations[0]


def read_of(*numbers: int, at: int = 100) -> Operation:
    """The last read of a set."""
    return (
        Story()
        .answered(Range("s/", "s0"), found(*(kv(f"s/{n}", str(n), n + 2) for n in numbers)), 9, at, at + 1)
        .operations[0]
    )


SETS = {
    "all there": ([added(0), added(1), read_of(0, 1)], set()),
    "unknown and there": ([added(0, "info"), read_of(0)], set()),
    "unknown and not there": ([added(0, "info"), read_of()], set()),
    "refused and not there": ([added(0, "fail"), read_of()], set()),
    "lost": ([added(0), added(1), read_of(1)], {"lost element"}),
    "refused and there": ([added(0, "fail"), read_of(0)], {"refused but done"}),
    "without a writer": ([added(0), read_of(0, 1)], {"phantom element"}),
    "never read": ([added(0)], {"no final read"}),
    "read too early": ([added(0), read_of(0, at=-5)], {"no final read"}),
}


@pytest.mark.parametrize(("operations", "rules"), SETS.values(), ids=SETS)
def test_sets(operations: list[Operation], rules: set[str]) -> None:
    assert {violation.rule for violation in sets.check(History(operations), "s/")} == rules


def hashes(**answers: tuple[int, int] | None) -> History:
    """A quiet point with these answers of the members."""
    return History([], [{"event": "hashes", "at": 1, "rev": 9, "members": answers}])


def test_members_that_hash_alike_pass() -> None:
    assert members.check_hashes(hashes(m1=(1, -1), m2=(1, -1), m3=(1, -1))) == []


@pytest.mark.parametrize(
    ("history", "rule"),
    [
        (hashes(m1=(1, -1), m2=(2, -1)), "members differ"),
        (hashes(m1=(1, 5), m2=(1, 6)), "members differ"),
        (hashes(m1=(1, -1), m2=None), "hash unknown"),
        (History([]), "no quiet point"),
        (History([], [{"event": "died", "at": 1, "member": "m1", "why": "status 1"}]), "died"),
        (History([], [{"event": "unhealthy", "at": 1, "why": "no leader"}]), "not live"),
    ],
)
def test_members_that_differ_or_say_nothing_are_flagged(history: History, rule: str) -> None:
    assert rule in {violation.rule for violation in members.check_hashes(history)}


def test_a_log_that_tells_of_a_bug_is_flagged(tmp_path: Path) -> None:
    log = tmp_path / "log"
    flood = '{"level": "warn", "msg": "lost the connection: GOAWAY ENHANCE_YOUR_CALM too_many_pings"}'
    unnamed = '{"level": "error", "msg": "the stream failed", "error": "Traceback (most recent call last): ..."}'
    stopped = '{"level": "fatal", "msg": "sync failed", "error": "Traceback (most recent call last): ..."}'
    short = (
        '{"level": "error", "msg": "a read failed", "error": "Traceback (most recent call last): ...\\nMemoryError"}'
    )
    thread = "Traceback (most recent call last):\n  File ...\nMemoryError"
    log.write_text("\n".join([flood, '{"level": "info", "msg": "ready"}', short, unnamed, thread, stopped]))
    assert logs.signs_of_bugs(log) == [flood, unnamed]
    violations = logs.check(History([], [{"event": "logged", "at": 1, "member": "m1", "line": flood}]))
    assert [violation.rule for violation in violations] == ["sign of a bug"]


@pytest.mark.parametrize("restarted", [{}, {"lives": (2, 2)}])
def test_revision_of_a_member_never_goes_back(restarted: dict[str, Any]) -> None:
    story = three().stale("k", 4, 0, 1).stale("k", 3, 2, 3, **restarted)
    assert [violation.rule for violation in members.check_monotone(story.history())] == ["revision went back"]


def test_status_of_a_member_never_goes_back() -> None:
    story = three().stale("k", 4, 0, 1)
    story.events.append({"event": "status", "member": 1, "call": 2, "at": 3, "rev": 3, "applied": 9})
    story.events.append({"event": "status", "member": 1, "call": 4, "at": 5, "rev": 4, "applied": 8})
    story.events.append({"event": "status", "member": 2, "call": 4, "at": 5, "rev": 2, "applied": 7})
    rules = [violation.rule for violation in members.check_monotone(story.history())]
    assert rules == ["revision went back", "applied index went back"]


def test_revision_may_be_older_on_another_member_and_among_overlapping_reads() -> None:
    elsewhere = three().stale("k", 4, 0, 1).stale("k", 3, 2, 3, member=2)
    overlapping = three().stale("k", 4, 0, 5).stale("k", 3, 2, 3)
    for story in (elsewhere, overlapping):
        assert members.check_monotone(story.history()) == []


def test_history_survives_its_file(tmp_path: Path) -> None:
    story = Story(Put("k", "a"), swap("k", "a", "b")).write(2, 0, 10).write(3, 20, 30).list("a", "z", 3, 40, 45)
    story.lost(Delete("k", "l", previous=True), 50, 60)
    before = History(story.operations, [{"event": "kill", "at": 15, "members": ["m1"]}], story.store)
    save(before, tmp_path / "history.jsonl")
    assert load(tmp_path / "history.jsonl") == before
