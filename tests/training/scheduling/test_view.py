"""What is shown of a cluster."""

from __future__ import annotations

import asyncio

import pytest

from raftkv.aio import connect
from raftkv.client.local import LocalCluster
from raftkv.client.records import RecordError
from raftkv.errors import ConfigError
from raftkv.training.records import CLUSTER_ROOT, Fault, RunKeys
from raftkv.training.scheduling.admission import ClusterKeys, HostRecord, Ledger, Need, admit, claim
from raftkv.training.scheduling.denylist import DenyKeys
from raftkv.training.scheduling.ledger import ClusterView, describe_cluster, list_clusters

KEYS = ClusterKeys("gpu")


def ledger() -> Ledger:
    needs = [Need("a-1", "h1", 2), Need("a-2", "h2", 2)]
    made = claim(Ledger(), "a", needs, 2, 4, weight=3, declared={"h2": 4})
    made = claim(made, "huge", [Need("x", "h1", 99)], 1, 1)
    made = claim(made, "b", [Need("b-1", "h1", 2), Need("b-2", "h2", 2)], 2, 2)
    return admit(made, {"h1": 2})


def test_a_cluster(raftkv_cluster: LocalCluster) -> None:
    async def story() -> ClusterView:
        async with connect(raftkv_cluster.endpoints) as kv:
            assert await list_clusters(kv) == []
            assert await describe_cluster(kv, "gpu") == ClusterView("gpu", (await kv.range("x")).revision)
            await kv.put(KEYS.ledger, ledger().encode())
            await kv.put(f"{KEYS.hosts}h1", HostRecord(2).encode())
            await kv.put(f"{DenyKeys(KEYS.base).denials}h9", b"")
            strike = DenyKeys(KEYS.base).strike("a", Fault(1, "n", "h2"))
            await kv.put(strike, b"{}")
            lease = await kv.lease(60).grant()
            await kv.put(RunKeys("a").node("a-1"), b"{}", lease=lease)
            await kv.put(RunKeys("b").node("ghost"), b"{}")
            await kv.put(f"{CLUSTER_ROOT}no cluster/ledger", b"")  # a wrong key, which hides no cluster
            await kv.put(f"{CLUSTER_ROOT}/ledger", b"")
            assert await list_clusters(kv) == ["gpu"]
            view = await describe_cluster(kv, "gpu")
            await kv.put(KEYS.ledger, b"?")
            with pytest.raises(RecordError):
                await describe_cluster(kv, "gpu")
            with pytest.raises(ConfigError):
                await describe_cluster(kv, "a/b")
            return view

    view = asyncio.run(story())
    hosts = [(host.host, host.slots, host.free, host.source, dict(host.held), host.strikes) for host in view.hosts]
    assert hosts == [
        ("h1", 2, 0, "host", {"a": 2}, 0),
        ("h2", 4, 2, "declared", {"a": 2}, 1),
        ("h9", 0, 0, "assumed", {}, 0),
    ]
    assert view.hosts[2].denied == "host h9 is left out"
    assert [(grant.run, grant.weight, grant.slots, grant.alive) for grant in view.grants] == [
        ("a", 3, {"h1": 2, "h2": 2}, True)
    ]
    assert [(waiting.place, waiting.run, waiting.alive) for waiting in view.queue] == [
        (1, "b", False),
        (0, "huge", False),
    ]
    assert view.queue[0].reason == "number 1 in line for slots that a holds"
    assert "more slots than there are on h1" in view.queue[1].reason
    plain = view.to_plain()
    assert plain["hosts"][1]["free"] == 2
    assert plain["queue"][0]["hosts"] == ("h1", "h2")
