"""The checker of locks and elections: correct histories pass, and violations of each rule are flagged."""

from __future__ import annotations

import json

import pytest

from jepsen.checkers import lock
from jepsen.history import Change, History, Operation, StoreRecord
from jepsen.ops import (
    Campaign,
    Compare,
    Done,
    Grant,
    HeldResult,
    KeyValue,
    Leader,
    LeaseResult,
    Lock,
    Proclaim,
    Put,
    PutResult,
    Range,
    RangeResult,
    Request,
    Resign,
    Result,
    Revoke,
    Txn,
    TxnResult,
    Unlock,
)
from jepsen.outcome import Failure
from jepsen.watches import Event, Message, Stream, Watched

NAME = "~r/n"
LOST = Failure("UNAVAILABLE", "Socket closed", definite=False)


class Story:
    """Keys under a name that the server creates and deletes, and operations, with times in seconds.

    ``tick`` is a read of another client that ties a revision to the clock: earlier revisions are older.
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.store = StoreRecord()
        self._living: dict[str, KeyValue] = {}
        self._now = 0

    def tick(self) -> Story:
        self._now += 1
        return self.ask(self._now, Range("q"), RangeResult(()), took=0)

    def come(self, *keys: str, value: str = "") -> Story:
        """Create keys, each at a separate revision."""
        for key in keys:
            rev = self.store.last + 1
            kv = KeyValue(f"{NAME}/{key}", value, rev, rev, 1, 9)
            self._become(rev, Change((kv,)))
        return self.tick()

    def say(self, key: str, value: str) -> Story:
        """Change the value of a key."""
        rev, old = self.store.last + 1, self._living[f"{NAME}/{key}"]
        self._become(rev, Change((KeyValue(old.key, value, old.create, rev, old.version + 1, 9),)))
        return self.tick()

    def go(self, key: str) -> Story:
        """Delete a key."""
        self._become(self.store.last + 1, Change((), (f"{NAME}/{key}",)))
        return self.tick()

    def ask(self, call: float, request: Request, result: Result | Failure, took: float = 0.5) -> Story:
        number = len(self.operations) + 1
        operation = Operation(number, f"c{number}", 1, int(call * 1e9), request, (1, 1), int((call + took) * 1e9))
        if isinstance(result, Failure):
            operation.failure = result
        else:
            operation.rev, operation.result = self.store.last, result
        self.operations.append(operation)
        return self

    def held(self, key: str, call: float, back: float, token: int = 0, lease: int = 9) -> Story:
        """Record that the lock was answered."""
        return self.ask(call, Lock(NAME, lease), HeldResult(f"{NAME}/{key}", token), back - call)

    def elected(self, key: str, call: float, back: float, token: int) -> Story:
        return self.ask(call, Campaign(NAME, 9, ""), HeldResult(f"{NAME}/{key}", token), back - call)

    def proclaimed(self, key: str, token: int, value: str, call: float) -> Story:
        return self.ask(call, Proclaim(NAME, f"{NAME}/{key}", token, 9, value), Done())

    def leads(self, kv: KeyValue | None, call: float) -> Story:
        return self.ask(call, Leader(NAME), RangeResult((kv,) if kv is not None else ()))

    def current(self, key: str) -> KeyValue:
        return self._living[f"{NAME}/{key}"]

    def history(self) -> History:
        return History(self.operations, [], self.store)

    def rules(self) -> set[str]:
        return {violation.rule for violation in lock.check(self.history())}

    def _become(self, rev: int, change: Change) -> None:
        self.store.last = rev
        self.store.changes[rev] = change
        self._living |= {kv.key: kv for kv in change.kvs}
        for key in change.deleted:
            self._living.pop(key, None)


def two() -> Story:
    """a comes (revision 2, second 1), b comes (3, 2), a goes (4, 3), b goes (5, 4)."""
    return Story().come("a").come("b").go("a").go("b").tick()


def led() -> Story:
    """a leads with v1 (revision 2, second 1), says v2 (3, 2), goes (4, 3)."""
    return Story().come("a", value="v1").say("a", "v2").go("a").tick()


V1 = KeyValue(f"{NAME}/a", "v1", 2, 2, 1, 9)
V2 = KeyValue(f"{NAME}/a", "v2", 2, 3, 2, 9)
ALIVE = (Grant(9, 60), LeaseResult(60))

GOOD = {
    "nothing happened": Story(),
    "one after the other": two().held("a", 0.5, 1.5).held("b", 1.5, 3.5),
    "with tokens": two().held("a", 0.5, 1.5, 2).held("b", 1.5, 3.5, 3),
    "answer late": two().held("a", 0.5, 9, 2).held("b", 1.5, 3.5, 3),
    "held between": two().held("a", 0.5, 2.5).held("b", 1.5, 4.5),
    "not answered": two().ask(0.5, Lock(NAME, 9), LOST).held("b", 1.5, 3.5),
    "asked again for what it holds": two().held("a", 0.5, 1.5, 2).held("a", 1.6, 1.8, 2),
    "given up, then another": two()
    .ask(0, *ALIVE)
    .held("a", 0.5, 1.5)
    .ask(2.2, Unlock(f"{NAME}/a"), Done())
    .held("b", 1.7, 3.5, lease=8),
    "revoked, then another": two()
    .ask(0, *ALIVE)
    .held("a", 0.5, 1.2)
    .ask(2.1, Revoke(9), Done())
    .held("b", 1.7, 3.5, lease=8),
    "lease may have ended": two().ask(0, Grant(9, 1), LeaseResult(1)).held("a", 0.5, 1.2).held("b", 1.7, 3.5, lease=8),
    "elected and proclaimed": led().elected("a", 0.5, 1.5, 2).proclaimed("a", 2, "v2", 1.6),
    "leader asked": led().elected("a", 0.5, 1.5, 2).leads(V1, 1.2).leads(V2, 2.1),
    "leader asked during a change": led().elected("a", 0.5, 1.5, 2).leads(V1, 1.8).leads(V2, 1.8),
}


@pytest.mark.parametrize("story", GOOD.values(), ids=GOOD)
def test_good_stories_pass(story: Story) -> None:
    assert story.rules() == set()


BAD = {
    "got the lock after its key was gone": (two().held("a", 3.5, 4.5), "M2 not held"),
    "got the lock while an older key lives": (two().held("b", 1.5, 1.9), "M2 not held"),
    "got a lock that never was": (two().held("c", 0.5, 1.5), "M2 not held"),
    "lease ended while it waited": (Story().come("a", "b").go("b").go("a").tick().held("b", 1.5, 3.5), "M2 not held"),
    "elected after its key was gone": (led().elected("a", 3.5, 4.5, 2), "M2 not held"),
    "wrong token": (two().held("a", 0.5, 1.5, 3), "M1 wrong token"),
    "token of its last change": (led().elected("a", 0.5, 2.5, 3), "M1 wrong token"),
    "older token later": (two().held("b", 1.5, 2.3, 3).held("a", 2.6, 9, 2), "M1 out of order"),
    "same token for another": (
        Story().come("a").go("a").come("b").tick().held("a", 0.5, 1.5, 2).held("b", 2.5, 3.5, 2),
        "M1 out of order",
    ),
    "two holders": (two().ask(0, *ALIVE).held("a", 0.5, 1.5).held("b", 1.7, 3.5, lease=8), "M1 two holders"),
    "two holders, one elected": (
        two().ask(0, *ALIVE).elected("a", 0.5, 1.5, 2).ask(1.7, Campaign(NAME, 8, ""), HeldResult(f"{NAME}/b", 3), 2),
        "M1 two holders",
    ),
    "two holders before it is given up": (
        two()
        .ask(0, *ALIVE)
        .held("a", 0.5, 1.5)
        .held("b", 1.7, 3.5, lease=8)
        .ask(4, Resign(NAME, f"{NAME}/a", 2, 9), LOST),
        "M1 two holders",
    ),
    "old leader": (led().elected("a", 0.5, 1.5, 2).leads(V1, 3.2), "E1 wrong leader"),
    "old value": (led().elected("a", 0.5, 1.5, 2).leads(V1, 4.1), "E1 wrong leader"),
    "leader without a candidate": (
        led().elected("a", 0.5, 1.5, 2).leads(KeyValue("x", "y", 2, 2, 1), 1.2),
        "E1 wrong leader",
    ),
    "proclaimed after the leadership": (
        led().elected("a", 0.5, 1.5, 2).proclaimed("a", 2, "v3", 3.2),
        "E2 not the leader",
    ),
    "proclaimed in another leadership": (
        led().elected("a", 0.5, 1.5, 2).proclaimed("a", 7, "v2", 1.6),
        "E2 not the leader",
    ),
}


@pytest.mark.parametrize(("story", "rule"), BAD.values(), ids=BAD)
def test_bad_stories_are_flagged(story: Story, rule: str) -> None:
    assert rule in story.rules()


def test_every_rule_is_broken_at_least_twice() -> None:
    flagged = [rule for _, rule in BAD.values()]
    assert {rule: flagged.count(rule) >= 2 for rule in flagged} == dict.fromkeys(flagged, True)


def added(*elements: str, guarded: bool, done: bool = True, at: int = 0) -> Operation:
    """A write of the whole list."""
    put = Put("list", json.dumps(elements))
    request: Request = Txn((Compare("k", "create", "=", 2),), (put,)) if guarded else put
    result: Result = TxnResult(done, (PutResult(),) if done else ()) if guarded else PutResult()
    return Operation(1, "c", 1, at, request, (1, 1), at + 1, 2, 7, result)


def final(*elements: str) -> Operation:
    kv = KeyValue("list", json.dumps(elements), 2, 2, 1)
    return Operation(2, "c", 1, 100, Range("list"), (1, 1), 101, 3, 7, RangeResult((kv,) if elements else ()))


@pytest.mark.parametrize(
    ("operations", "missing"),
    [
        ([added("a", guarded=True), added("a", "b", guarded=True, at=5), final("a", "b")], []),
        ([added("a", guarded=True, done=False), final()], []),
        ([added("a", guarded=False), final("a")], []),
        ([added("a", guarded=True), added("b", guarded=True, at=5), final("b")], ["a"]),
        ([added("a", guarded=False), added("b", guarded=False, at=5), final("b")], ["a"]),
        ([added("a", guarded=True), final()], ["a"]),
        ([added("a", guarded=True)], ["a"]),
    ],
)
def test_lost_updates(operations: list[Operation], missing: list[str]) -> None:
    assert lock.lost(History(operations), "list") == missing


def observed(*kvs: KeyValue) -> set[str]:
    """Return what is found when an observer gets these leaders."""
    history = led().elected("a", 0.5, 1.5, 2).history()
    messages = [Message(100, "events", kv.mod, (Event("put", kv),)) for kv in kvs]
    history.streams = [Stream(f"observe/{NAME}", 0, 1, Watched(NAME), 50, messages)]
    return {violation.rule for violation in lock.check(history)}


def test_observers_are_told_the_truth_in_order() -> None:
    assert observed() == observed(V1) == observed(V1, V2) == observed(V2) == observed(V2, V2) == set()
    assert observed(V2, V1) == observed(V1, V2, V1) == {"E1 observed back"}
    assert observed(KeyValue(f"{NAME}/a", "v3", 2, 2, 1, 9)) == {"E1 wrong leader"}
    assert observed(V1, KeyValue(f"{NAME}/b", "v1", 5, 5, 1, 9)) == {"E1 wrong leader"}
