"""The lease checker: correct histories pass, and each guarantee, broken in at least two ways, is flagged."""

from __future__ import annotations

from typing import Any

import pytest

from jepsen.checkers import lease
from jepsen.history import Change, History, Operation, StoreRecord
from jepsen.ops import Done as DoneResult
from jepsen.ops import (
    Grant,
    KeepAlive,
    KeyValue,
    LeaseResult,
    Put,
    PutResult,
    Range,
    RangeResult,
    Request,
    Result,
    Revoke,
    TimeToLive,
    Txn,
    TxnResult,
)
from jepsen.outcome import Failure
from jepsen.watches import Message, Stream, Watched

S = 1_000_000_000
ID = 7
GONE = Failure("NOT_FOUND", "etcdserver: requested lease not found", definite=True)
EXISTS = Failure("FAILED_PRECONDITION", "etcdserver: lease already exists", definite=True)
LOST = Failure("UNAVAILABLE", "Socket closed", definite=False)


class Life:
    """The history of a lease and its key: times in seconds; requests take 0.1 s by default.

    The store begins with the key at revision 2 (see ``keyed``), and ``ended`` deletes it at the next revision.
    """

    def __init__(self, system: str = "raftkv") -> None:
        self.operations: list[Operation] = []
        self.events: list[dict[str, Any]] = [{"event": "settings", "at": 0, "system": system, "election_ms": 500}]
        self.streams: list[Stream] = []
        self.store = StoreRecord()
        self._living: dict[str, KeyValue] = {}

    def ask(self, at: float, request: Request, result: Result | Failure, rev: int = 0, took: float = 0.1) -> Life:
        """Any request."""
        operation = Operation(len(self.operations) + 1, f"c{len(self.operations)}", 1, int(at * S), request, (1, 1))
        operation.returned, operation.rev = int((at + took) * S), rev or self.store.last
        if isinstance(result, Failure):
            operation.failure = result
        else:
            operation.result = result
        self.operations.append(operation)
        return self

    def grant(self, at: float, ttl: int = 2, lease_id: int = ID) -> Life:
        return self.ask(at, Grant(lease_id, ttl), LeaseResult(ttl))

    def renew(self, at: float, ttl: int = 2, took: float = 0.1, lease_id: int = ID) -> Life:
        return self.ask(at, KeepAlive(lease_id), LeaseResult(ttl), took=took)

    def keyed(self, at: float, *keys: str, lease_id: int = ID) -> Life:
        """Put keys, with the lease, in one revision."""
        names = [f"~l/{key}" for key in keys or ("a",)]
        rev = self.store.last + 1
        kvs = tuple(KeyValue(name, f"v{rev}", rev, rev, 1, lease_id) for name in names)
        self._become(rev, Change(kvs))
        puts = tuple(Put(name, f"v{rev}", lease=lease_id) for name in names)
        return self.ask(at, Txn((), puts), TxnResult(True, (PutResult(),) * len(puts)), rev)

    def ended(self, *keys: str) -> Life:
        """The server deletes keys, in one revision."""
        self._become(self.store.last + 1, Change((), tuple(f"~l/{key}" for key in keys or ("a",))))
        return self

    def read(self, at: float, took: float = 0.1) -> Life:
        """A read of the store as it is now."""
        return self.ask(at, Range("~l/", "~l0"), RangeResult(tuple(self._living.values())), took=took)

    def time_to_live(self, at: float, ttl: int) -> Life:
        """Ask for the remaining TTL."""
        return self.ask(at, TimeToLive(ID), LeaseResult(ttl, 2 if ttl >= 0 else 0))

    def watched(self, at: float) -> Life:
        """Add a watcher that sees the last revision."""
        message = Message(int(at * S), "progress", self.store.last)
        self.streams.append(Stream("w", 0, 1, Watched("~l/", "~l0"), 0, [message]))
        return self

    def fault(self, began: float, healed: float, target: str = "leader") -> Life:
        self.events += [
            {"event": "kill", "at": int(began * S), "target": target},
            {"event": "heal", "at": int(healed * S)},
        ]
        return self

    def rules(self) -> set[str]:
        self.store.states[self.store.last] = tuple(self._living.values())
        history = History(self.operations, self.events, self.store, self.streams)
        return {violation.rule for violation in lease.check(history)}

    def _become(self, rev: int, change: Change) -> None:
        self.store.last = rev
        self.store.changes[rev] = change
        self._living |= {kv.key: kv for kv in change.kvs}
        for key in change.deleted:
            self._living.pop(key, None)


def born() -> Life:
    """Granted at 0 for 2 s, with a key."""
    return Life().grant(0).keyed(0.2)


GOOD = {
    "nothing happened": Life(),
    "ends in time": born().read(1.9).ended().read(2.1),
    "ends as late as may be": born().read(4.9).ended().read(5),
    "renewed": born().renew(1).ended().read(3.2),
    "renewed, unanswered": born().ask(1, KeepAlive(ID), LOST).ended().read(2.2),
    "revoked": born().ask(1, Revoke(ID), DoneResult()).ended().read(1.2),
    "revoked, unanswered": born().ask(1, Revoke(ID), LOST).ended().read(1.2),
    "renewal too late": born().read(1.9).ended().read(2.1).ask(2.3, KeepAlive(ID), LeaseResult(0)),
    "put too late": born().ended().read(2.3).ask(3, Put("~l/b", "x", lease=ID), GONE),
    "without keys": Life().grant(0).time_to_live(1, 1).time_to_live(2.2, -1),
    "zero left": born().time_to_live(2.0, 0).ended().read(2.2),
    "all keys at once": Life().grant(0).keyed(0.2, "a", "b").keyed(0.4, "c").ended("a", "b", "c").read(2.3),
    "two leases": Life()
    .grant(0)
    .keyed(0.2, "a")
    .grant(0.3, lease_id=8)
    .keyed(0.5, "b", lease_id=8)
    .ended("a")
    .ended("b")
    .read(2.4),
    "key taken over": Life().grant(0).grant(0, 9, 8).keyed(0.2).keyed(0.4, lease_id=8).read(4.9),
    "late because of a fault": born().fault(1, 4).ask(4.1, Put("q", "q"), LOST).read(4.9).ended().read(7),
    "all of it again because all were killed": born().fault(1, 3, "all").read(6.5).ended().read(7),
    "id taken": born().ask(1, Grant(ID, 2), EXISTS).ended().read(2.2),
    "id used again": born().ended().read(2.2).grant(3),
    "id perhaps used again": born().ended().read(2.2).ask(3, Grant(ID, 2), LOST).renew(3.5),
    "grant that may have happened": Life().ask(0, Grant(ID, 2), LOST).ask(1, Grant(ID, 2), EXISTS),
    "seen by a watcher": born().ended().watched(2.05),
}
GOOD["etcd gives all of it again"] = Life("etcd").grant(0).keyed(0.2).fault(1, 3).read(6.5).ended().read(7)


@pytest.mark.parametrize("life", GOOD.values(), ids=GOOD)
def test_good_lives_pass(life: Life) -> None:
    assert life.rules() == set()


BAD = {
    "half of its keys": (Life().grant(0).keyed(0.2, "a", "b").ended("a").ended("b").read(3), "L1 not whole"),
    "a key forgotten": (Life().grant(0).keyed(0.2, "a", "b").ended("a").read(3), "L1 not whole"),
    "two leases in one revision": (
        Life().grant(0).keyed(0.2, "a").grant(0.3, lease_id=8).keyed(0.5, "b", lease_id=8).ended("a", "b").read(3),
        "L1 not whole",
    ),
    "read too early": (born().ended().read(1.8), "L2 early"),
    "watched too early": (born().ended().watched(1.9), "L2 early"),
    "answered too early": (Life().grant(0).time_to_live(1, -1), "L2 early"),
    "renewal refused too early": (born().ask(1, KeepAlive(ID), LeaseResult(0)), "L2 early"),
    "put refused too early": (born().ask(1, Put("~l/b", "x", lease=ID), GONE), "L2 early"),
    "early after a renewal": (born().renew(1).ended().read(2.5), "L2 early"),
    "early after a slow renewal": (born().renew(1, took=0.9).ended().read(2.5), "L2 early"),
    "early though the revoke came later": (born().ended().read(1.0).ask(1.5, Revoke(ID), GONE), "L2 early"),
    "early after a fault": (born().fault(0.5, 1).ended().read(1.5), "L2 early"),
    "late": (born().read(5.2).ended().read(5.4), "L3 late"),
    "never": (born().read(60), "L3 late"),
    "late without keys": (Life().grant(0).time_to_live(5.2, 0), "L3 late"),
    "late after a fault": (born().fault(1, 3).ask(3.1, Put("q", "q"), LOST).read(6.3).ended().read(7), "L3 late"),
    "late after the death of all": (born().fault(1, 3, "all").read(8.3).ended().read(9), "L3 late"),
    "renewed after its end": (born().ended().read(2.2).renew(3), "L5 after its end"),
    "answered alive after its end": (born().ended().read(2.2).time_to_live(3, 1), "L5 after its end"),
    "renewed after it was refused": (
        born().ask(2.2, KeepAlive(ID), LeaseResult(0)).ask(3, KeepAlive(ID), LeaseResult(2)),
        "L5 after its end",
    ),
    "given a key after its end": (born().ended().read(2.2).keyed(3, "b"), "L5 after its end"),
    "granted twice": (Life().grant(0).grant(1), "L6 granted twice"),
    "granted while renewed": (Life().grant(0).renew(1.5).grant(3), "L6 granted twice"),
    "refused though it is free": (Life().ask(0, Grant(ID, 2), EXISTS), "L6 refused"),
    "refused again": (Life().grant(0, lease_id=8).ask(1, Grant(ID, 2), EXISTS), "L6 refused"),
}


@pytest.mark.parametrize(("life", "rule"), BAD.values(), ids=BAD)
def test_bad_lives_are_flagged(life: Life, rule: str) -> None:
    assert rule in life.rules()


def test_every_guarantee_is_broken_at_least_twice() -> None:
    flagged = [rule.split()[0] for _, rule in BAD.values()]
    assert all(flagged.count(name) >= 2 for name in ("L1", "L2", "L3", "L5", "L6"))


def test_lateness_is_counted_from_the_last_renewal() -> None:
    life = born().renew(1).ended().read(3.2)
    life.rules()
    history = History(life.operations, life.events, life.store, life.streams)
    assert lease.lateness_s(history) == [pytest.approx(0.3)]


def test_an_id_that_was_granted_again_is_late_for_nothing() -> None:
    life = born().ended().read(2.2).grant(3)
    life.rules()
    assert lease.lateness_s(History(life.operations, life.events, life.store, life.streams)) == []


@pytest.mark.parametrize(("joining", "added", "late"), [(1, 2.1, False), (1, 1.1, False), (6, 6.1, True)])
def test_a_member_that_received_the_data_may_give_the_whole_ttl_again(joining: float, added: float, late: bool) -> None:
    life = born().read(5.8).ended().read(5.9)
    life.events += [
        {"event": "joining", "at": int(joining * S), "member": "m2"},
        {"event": "added", "at": int(added * S), "member": "m2"},
    ]
    assert life.rules() == ({"L3 late"} if late else set())


def test_membership_change_is_not_an_outage() -> None:
    """A later fault, or no fault, does not excuse a lease that ends late during the change."""
    life = born().read(5.2).ended().read(5.3)
    life.events.append({"event": "member", "at": int(0.1 * S), "change": "replace", "members": ["m1"]})
    life.fault(7, 8)
    assert life.rules() == {"L3 late"}
