"""Every row of the hostile benchmark works, and small attacks leave a cluster as it was. No bar of time: CI is busy."""

from __future__ import annotations

import asyncio
from time import monotonic

import pytest

from bench.hostile.attacker import Attacker, secure
from bench.hostile.measure import Outcome
from bench.hostile.report import misses, together
from bench.hostile.rows import ROWS
from bench.hostile.stage import HonestProcess, agreement, leader_number, members, metrics_of

CHANGES = "etcd_server_leader_changes_seen_total"
SCALE = 0.002
SECONDS = 0.2


async def _attack_with_every_row() -> None:
    with members("raftkv") as cluster:
        leader = await leader_number(cluster)
        before = [metrics_of(member)[CHANGES] for member in cluster.members]
        honest = HonestProcess(cluster.endpoints, streams=True)
        try:
            honest.mark()
            for row in [row for row in ROWS if not row.users]:
                attacker = Attacker(cluster.endpoints, leader, SCALE, SCALE)
                try:
                    await row.prepare(attacker)
                    attacker.until = monotonic() + SECONDS
                    await row.attack(attacker)
                finally:
                    await attacker.close()
                # A row whose request is invalid in itself would measure nothing.
                assert not any("INVALID_ARGUMENT" in text for text in attacker.refusals), (row.name, attacker.refusals)
            summary = await honest.tell()
        finally:
            honest.end()
        assert (await agreement(cluster)).problem == ""
        assert [metrics_of(member)[CHANGES] for member in cluster.members] == before
        assert summary["errors"] == 0, summary["error_texts"]
        assert min(summary[name]["count"] for name in ("put", "read", "event")) > 0


@pytest.mark.long
def test_small_attacks_leave_members_alive_and_equal_under_the_same_leader() -> None:
    asyncio.run(_attack_with_every_row())


EXPECTED_REFUSALS = ("authentication failed", "has its share of the", "user name already exists", "invalid auth token")


async def _attack_with_rows_of_users() -> None:
    with members("raftkv") as cluster:
        attacker = Attacker(cluster.endpoints, await leader_number(cluster), SCALE, SCALE)
        attacker.token = await secure(attacker.endpoint)
        try:
            for row in [row for row in ROWS if row.users]:
                await row.prepare(attacker)
                attacker.until = monotonic() + SECONDS
                await row.attack(attacker)
        finally:
            await attacker.close()
        assert (await agreement(cluster, attacker.token)).problem == ""
        refused = [text for text in attacker.refusals if not any(word in text for word in EXPECTED_REFUSALS)]
        assert refused == [], attacker.refusals


@pytest.mark.long
def test_small_attacks_of_rows_of_users_leave_members_alive_and_equal() -> None:
    asyncio.run(_attack_with_rows_of_users())


def test_names_of_rows_differ() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)


def _outcome(program: str, p99_ms: float, **changes: object) -> Outcome:
    outcome = Outcome("row", program, put={"p99_ms": p99_ms})
    for name, value in changes.items():
        setattr(outcome, name, value)
    return outcome


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({}, []),
        ({"turns_own_ms": [3.0, 50.0]}, []),
        ({"turns_own_ms": [3.0, 51.0]}, ["a turn of 51 ms"]),
        ({"leader_changes": 2}, ["2 changes of leader"]),
        ({"problem": "m1 died"}, ["m1 died"]),
        ({"errors": 1}, ["1 honest errors"]),
        ({"put": {"p99_ms": 21.0}}, ["honest p99 21.0 ms, etcd's 20.0"]),
    ],
)
def test_bars(changes: dict[str, object], missed: list[str]) -> None:
    assert misses(_outcome("raftkv", 20.0, **changes), _outcome("etcd", 20.0)) == missed


def test_of_several_rounds_the_median_latency_and_the_worst_of_the_rest_count() -> None:
    rounds = [
        _outcome("raftkv", p99_ms, turns_own_ms=[turn_ms]) for p99_ms, turn_ms in ((9.0, 60.0), (3.0, 1.0), (5.0, 2.0))
    ]
    rounds[1].leader_changes = 1
    whole = together(rounds)
    assert (whole.put["p99_ms"], whole.turns_own_ms, whole.leader_changes) == (5.0, [60.0], 1)
