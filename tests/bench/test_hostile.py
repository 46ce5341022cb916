"""Every row of the hostile benchmark works, and small attacks leave a cluster as it was. No bar of time: CI is busy."""

from __future__ import annotations

import asyncio
import contextlib
from time import monotonic

import pytest

import raftkv
from bench.hostile.attacker import Attacker, secure
from bench.hostile.honest import PREFIX, HonestProcess
from bench.hostile.measure import SIZE, Outcome, agreement, elections, metrics_of, misses, table, together
from bench.hostile.rows import ROWS, Row
from bench.stage import number_of_leader
from tests.procs import RAFTKV, Cluster

EXPECTED_REFUSALS = ("authentication failed", "user name already exists")
SCALE = 0.002
SECONDS = 0.2


async def _attack_with(rows: list[Row], cluster: Cluster, leader: int, token: str = "") -> None:
    for row in rows:
        attacker = Attacker(cluster.endpoints, leader, SCALE, token=token)
        try:
            await row.prepare(attacker)
            attacker.until = monotonic() + SECONDS
            await row.attack(attacker)
        finally:
            await attacker.close()
        refused = [text for text in attacker.refusals if not any(word in text for word in EXPECTED_REFUSALS)]
        # A row whose request is invalid in itself would measure nothing.
        assert not any(row.users or "INVALID_ARGUMENT" in text for text in refused), (row.name, attacker.refusals)


async def _attack_with_every_row() -> None:
    with Cluster(RAFTKV, SIZE) as cluster, contextlib.ExitStack() as stack:
        leader = number_of_leader(cluster)
        before = [metrics_of(member) for member in cluster.members]
        clients = [stack.enter_context(raftkv.connect(endpoint)) for endpoint in cluster.endpoints]
        watches = [kv.watch(PREFIX, prefix=True) for kv in clients]
        honest = HonestProcess(cluster.endpoints)
        try:
            rows = [row for row in ROWS if not row.users]
            told, _ = await honest.window(lambda: _attack_with(rows, cluster, leader))
        finally:
            honest.end()
        assert await agreement(cluster) == ""
        assert elections(before, [metrics_of(member) for member in cluster.members]) == 0
        assert told["errors"] == 0, told["error_texts"]
        seen = [[next(watch).kv.mod_revision for _ in range(told["put"]["count"])] for watch in watches]
        assert seen[0] == sorted(set(seen[0]))
        assert seen == [seen[0]] * len(watches)


@pytest.mark.long
def test_small_attacks_leave_members_alive_and_equal_under_the_same_leader() -> None:
    asyncio.run(_attack_with_every_row())


async def _attack_with_rows_of_users() -> None:
    with Cluster(RAFTKV, SIZE) as cluster:
        leader = number_of_leader(cluster)
        token = await secure(cluster.endpoints[leader])
        await _attack_with([row for row in ROWS if row.users], cluster, leader, token)
        assert await agreement(cluster, token) == ""


@pytest.mark.long
def test_small_attacks_of_rows_of_users_leave_members_alive_and_equal() -> None:
    asyncio.run(_attack_with_rows_of_users())


def test_names_of_rows_differ() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)


def _outcome(program: str, p99_ms: float, **changes: object) -> Outcome:
    outcome = Outcome("row", program, put={"p50_ms": 1.0, "p99_ms": p99_ms, "max_ms": 99.0})
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


def test_table_names_missed_bars() -> None:
    line = table([{"etcd": _outcome("etcd", 20.0), "raftkv": _outcome("raftkv", 20.0, errors=1)}]).splitlines()[-1]
    assert line.startswith("| row | raftkv | 1 honest errors |")
