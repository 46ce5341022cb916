"""The record of the whole cluster, when a member's own figures are wrong."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from raftkv.pb import raft_pb2, rpc_pb2
from raftkv.server.ui.cluster import ClusterFigures, Identity

OWN: dict[str, Any] = {"role": "follower", "puts": 5, "index": 7, "uptime_s": 1.5, "peers": {}}


def record(*answers: bytes) -> dict[str, Any]:
    """The last of as many records, of this member and one that answers like this."""

    async def run() -> dict[str, Any]:
        left = list(answers)

        async def unary(*_: object, **__: object) -> bytes:
            return raft_pb2.FiguresResponse(json=left.pop(0)).SerializeToString()

        members = [rpc_pb2.Member(ID=number, name=f"m{number}") for number in (1, 2)]
        applier: Any = SimpleNamespace(
            membership=SimpleNamespace(list=lambda: members), alarms=SimpleNamespace(raised=list)
        )
        figures: Any = SimpleNamespace(take=lambda: dict(OWN))
        channel: Any = SimpleNamespace(unary=unary)
        cluster = ClusterFigures(figures, applier, Identity(9, 1, "m1"), lambda _: channel)
        return [await cluster.collect() for _ in answers][-1]

    return asyncio.run(run())


@pytest.mark.parametrize(
    "said",
    [
        b"[]",
        b"{",
        b'{"puts":"5"}',
        b'{"puts":null}',
        b'{"uptime_s":"long"}',
        b'{"role":"leader","index":"7"}',
        b'{"role":"leader","index":NaN}',
        b'{"role":"leader","index":Infinity}',
        b'{"role":"leader","peers":[]}',
        b'{"role":"leader","peers":{"2":1}}',
        b'{"role":"leader","peers":{"2":{"match":"x"}}}',
        b'{"a":' * 100_000,
    ],
)
def test_invalid_figures_hide_no_other_member(said: bytes) -> None:
    """One member that said nonsense, or was of a version to come, left the pages of all others without a record."""
    found = record(said, said)
    json.dumps(found, allow_nan=False)
    assert [(row["name"], row["reachable"]) for row in found["members"]] == [("m1", True), ("m2", True)]
    assert found["members"][0]["puts"] == 5


def test_a_leader_that_says_little_is_shown_as_it_is() -> None:
    (_, leader) = record(b'{"role":"leader","peers":{"1":{"match":3}}}')["members"]
    assert (leader["role"], leader["lag"]) == ("leader", 0)


def test_member_record_cannot_override_its_identity() -> None:
    said = {"role": "follower", "name": "m1", "id": "1", "client_urls": ["javascript:alert(1)"], "reachable": False}
    (_, row) = record(json.dumps(said).encode())["members"]
    assert (row["name"], row["id"], row["client_urls"], row["reachable"]) == ("m2", "2", [], True)
