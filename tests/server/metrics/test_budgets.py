"""Every limited resource reports its use and limit in one pair of metric families."""

from __future__ import annotations

from itertools import chain
from types import SimpleNamespace
from typing import Any, cast

from raftkv.replica.node.waits import NodeSettings
from raftkv.rpc.server.server import Server
from raftkv.server.metrics.budgets import budget_metrics, identity_metrics


async def test_each_budget_has_a_use_and_a_limit() -> None:
    server = Server()
    uses = server.answers.uses
    uses.charge(b"alice", 0.25, 3, 1000)
    server.answers.used_bytes, server.answers.held_bytes = 10, 20
    parts = {
        "node": SimpleNamespace(
            proposals=SimpleNamespace(shares=SimpleNamespace(used=30, limit=1 << 28), late=4),
            uses=uses,
            proposals_dropped=2,
            backlog=SimpleNamespace(size_bytes=35, appends_dropped=3),
            settings=NodeSettings(1, 0.1, 1.0),
        ),
        "hub": SimpleNamespace(
            shares=SimpleNamespace(used=40, limit=1 << 30), counts=SimpleNamespace(held={b"alice": 5, b"bob": 6})
        ),
        "admission": SimpleNamespace(disk_free_bytes=50),
        "transport": SimpleNamespace(
            peers={number: SimpleNamespace(backlog_bytes=size) for number, size in enumerate((None, 60, 7))}
        ),
    }
    metrics = list(budget_metrics(server.answers, {"client": server}, **cast("dict[str, Any]", parts)))
    leases = {b"alice": 7, "address 10.0.0.7": 1, "address 10.0.0.8": 1}
    who = identity_metrics(cast(Any, parts["node"]), cast(Any, parts["hub"]), cast(Any, leases))
    assert not any("identity" in sample.labels for family in metrics for sample in family.samples)
    samples = [sample for family in chain(metrics, who) for sample in family.samples]
    found = {"/".join((sample.name, *sample.labels.values())): sample.value for sample in samples}
    used = {name.partition("/")[2]: value for name, value in found.items() if name.startswith("raftkv_budget_used")}
    assert used == {
        "responses": 10,
        "unfinished_requests": 20,
        "proposals": 30,
        "unapplied": 35,
        "watchers": 40,
        "peer_messages": 60,
    }
    limits = {name.partition("/")[2]: value for name, value in found.items() if name.startswith("raftkv_budget_limit")}
    assert limits.keys() == used.keys()
    assert all(limit > 1 << 20 for limit in limits.values())
    assert found["raftkv_connections/client"] == 0
    assert found["raftkv_connections_limit/client"] == 10_000
    assert found["raftkv_disk_free_bytes"] == 50
    assert found["raftkv_proposals_dropped_total"] == 2
    assert found["raftkv_appends_dropped_total"] == 3
    assert found["raftkv_proposals_late_total"] == 4
    names = {"loop_seconds_total": 0.25, "requests_total": 3, "bytes_total": 1000, "watches": 5, "leases": 7}
    assert {name: found[f"raftkv_identity_{name}/user alice"] for name in names} == names
    assert found["raftkv_identity_requests_total/other"] == 0
    assert (found["raftkv_identity_watches/other"], found["raftkv_identity_leases/other"]) == (6, 2)
