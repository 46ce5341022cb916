"""Subscriptions of a member: their order, and that they are made in one place."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raftkv.raft.log import MemoryLog
from raftkv.raft.types import ConfState, Entry, EntryType, HardState, SnapshotMeta
from raftkv.replica.replica import Replica

PRODUCT = Path(__file__).parents[2] / "raftkv"
SUBSCRIPTION = re.compile(
    r"\.(on_applied|on_leader_change|on_conf_change|on_swapped|on_end)(\.append|\.extend| \+=)|\.on_changes = "
)


class Recorded:
    """A part of which every method notes its name when called."""

    def __init__(self, name: str, called: list[str]) -> None:
        self._name = name
        self._called = called

    def __getattr__(self, method: str) -> Any:
        return lambda *_: self._called.append(f"{self._name}.{method}")


def test_subscribers_are_called_in_the_order_that_connect_shows() -> None:
    called: list[str] = []
    recorded = {
        name: Recorded(name, called)
        for name in ("hub", "graces", "leader_guard", "leader_log", "disk", "admission", "departure", "hashes")
    }
    log = SimpleNamespace(snapshot=lambda: SnapshotMeta(5, 1))
    node = SimpleNamespace(on_applied=[], on_leader_change=[], on_conf_change=[], log=log, damaged=called.append)
    installer = SimpleNamespace(on_received=[], on_swapped=[])
    transport, service = Recorded("transport", called), Recorded("service", called)
    store, lessor = SimpleNamespace(on_changes=None), Recorded("lessor", called)
    lessor.__dict__ |= {"on_end": [], "times": object()}
    applier = SimpleNamespace(
        **{
            name: Recorded(name, called)
            for name in ("membership", "alarms", "downgrade", "quotas", "limits", "auth", "leases")
        }
    )
    applier.membership.__dict__["members"] = {}
    parts: dict[str, Any] = {"node": node, "installer": installer, "store": store, "lessor": lessor, "applier": applier}
    around: dict[str, Any] = {"graces": recorded.pop("graces")}
    around["leader_changed"] = (recorded.pop("leader_log").leader_changed,)
    membership, runner = applier.membership, SimpleNamespace()
    replica = SimpleNamespace(**parts, **recorded, watch_runner=runner, peers=transport, membership=membership)
    replica._subscribe_to_databases = partial(Replica._subscribe_to_databases, cast(Any, replica))
    Replica.connect(cast(Any, replica), **around, followers=(service.follow,))
    assert called == ["admission.conf_changed"], "a learner is one from the start"

    def calls(callbacks: list[Any], *arguments: object) -> list[str]:
        called.clear()
        for callback in callbacks:
            callback(*arguments)
        return list(called)

    assert calls(installer.on_received, object()) == ["leases.receive"]
    assert calls([store.on_changes], 2, []) == ["hub.changed"]
    assert calls(lessor.__dict__["on_end"], 7) == ["graces.lease_ended"]
    assert calls(node.on_applied) == ["hub.applied", "lessor.applied"]
    assert calls(node.on_leader_change) == [
        "leader_guard.leader_changed",
        "lessor.leader_changed",
        "leader_log.leader_changed",
    ]
    followers = ["admission.conf_changed", "departure.conf_changed", "transport.follow", "service.follow"]
    assert calls(node.on_conf_change) == followers
    meta = SnapshotMeta(5, 1)
    reloaded = ["membership", "alarms", "downgrade", "quotas", "limits", "auth", "leases"]
    swapped = ["disk.submit", *(f"{name}.reload" for name in reloaded), "hub.restored", "hashes.forget"]
    assert calls(installer.on_swapped, meta) == swapped
    assert calls(installer.on_swapped, SnapshotMeta(4, 1)) == swapped[1:], "a newer database came meanwhile"
    assert applier.leases.observer is lessor.__dict__["times"]


@pytest.mark.parametrize(
    ("term", "voters", "unapplied", "read_leases", "expected"),
    [
        (0, (1,), EntryType.NORMAL, True, False),
        (3, (1,), EntryType.NORMAL, False, False),
        (3, (1,), EntryType.NORMAL, True, True),
        (3, (1,), EntryType.CONF_CHANGE_V2, False, True),
        (3, (1, 2), EntryType.NORMAL, False, True),
    ],
)
def test_member_waits_for_leases_unless_no_other_can_have_led(term, voters, unapplied, read_leases, expected):
    log = MemoryLog()
    log.conf_state = ConfState(voters=voters)
    log.hard_state = HardState(term)
    log.append([Entry(max(term, 1), 1), Entry(max(term, 1), 2, b"", unapplied)])
    replica: Any = SimpleNamespace(
        durable=SimpleNamespace(log=log, member_id=1),
        config=SimpleNamespace(read_leases=read_leases),
        store=SimpleNamespace(applied_index=1),
    )
    assert Replica._starts_within_lease(replica) is expected


def test_subscriptions_are_in_one_place() -> None:
    elsewhere = [
        f"{path.relative_to(PRODUCT)}: {line.strip()}"
        for room in ("replica", "server")
        for path in sorted((PRODUCT / room).rglob("*.py"))
        if path.name != "replica.py"
        for line in path.read_text().splitlines()
        if SUBSCRIPTION.search(line)
    ]
    assert elsewhere == []


def test_database_is_compared_with_this_history_only_if_it_is_newer() -> None:
    """A member that went on through the log stopped when an older database arrived late: it lacks the last record."""
    newest = (b"revision key", b"key and value")
    store = SimpleNamespace(applied_index=5, revision=3, history=lambda first, last: iter([newest]))
    found = [Replica._newest_record(cast(Any, SimpleNamespace(store=store)), index) for index in (4, 5, 6)]
    assert found == [None, None, newest]
