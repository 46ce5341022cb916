"""One row with one program: fresh members, data, an honest client, the attack, and what became of all of them."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final

from bench.hostile.attacker import Attacker, secure
from bench.hostile.rows import Row
from bench.hostile.stage import (
    Agreement,
    HonestProcess,
    agreement,
    leader_number,
    log_bytes,
    long_turns,
    members,
    metrics_of,
    sampled_mib,
)
from raftkv.rpc.status import RpcError
from tests.procs import Cluster, ProcessError

QUIET_S: Final = 1.0
AFTER_S: Final = 0.5
ATTACK_TIMEOUT_S: Final = 240.0
_LEADER_CHANGES: Final = "etcd_server_leader_changes_seen_total"
_LONGEST_TURN: Final = "raftkv_loop_turn_longest_seconds"
_LONGEST_OWN_TURN: Final = "raftkv_loop_turn_longest_own_seconds"


@dataclass
class Outcome:
    """What one program did in one row. Times in milliseconds unless the name says otherwise.

    Attributes:
        turns_ms, turns_own_ms: the longest turn of each member of raftkv, by the clock, and without waits for a
            processor that others had.
        work: how long the longest turns were and what they did, as the members logged it (one a second).
        put, read: count, p50_ms, p99_ms, max_ms of the honest client's.
        errors: of the honest client.
        peak_mb, growth_mb: anonymous memory of the largest member, and how much more than before the attack.
        problem: why the members are not what they were: one died, or they differ; empty: they are.
    """

    row: str
    program: str
    turns_ms: list[float] = field(default_factory=list)
    turns_own_ms: list[float] = field(default_factory=list)
    work: list[str] = field(default_factory=list)
    put: dict[str, float] = field(default_factory=dict)
    read: dict[str, float] = field(default_factory=dict)
    quiet_put_p99_ms: float = 0.0
    errors: int = 0
    error_texts: list[str] = field(default_factory=list)
    attack_s: float = 0.0
    rounds: int = 0
    leader_changes: int = 0
    peak_mb: float = 0.0
    growth_mb: float = 0.0
    restart_s: float = 0.0
    refusals: dict[str, int] = field(default_factory=dict)
    notes: dict[str, float] = field(default_factory=dict)
    problem: str = ""


async def measure(row: Row, program: str, scale: float, seconds: float) -> Outcome:
    """Run a row. What the members do wrong is in the outcome; what the benchmark cannot do raises."""
    outcome = Outcome(row.name, program)
    with members(program) as cluster:
        attacker = Attacker(cluster.endpoints, await leader_number(cluster), scale, scale)
        try:
            attacker.token = await secure(attacker.endpoint) if row.users else ""
            await asyncio.wait_for(row.prepare(attacker), ATTACK_TIMEOUT_S)
            await _attack(cluster, row, attacker, seconds, outcome)
        except TimeoutError:
            outcome.problem = f"longer than {ATTACK_TIMEOUT_S:g} s"
        finally:
            await attacker.close()
        outcome.refusals, outcome.notes = dict(attacker.refusals.most_common(5)), attacker.notes
        outcome.problem = outcome.problem or (await _agreement(cluster, attacker.token)).problem
        if row.restarts and not outcome.problem:
            outcome.restart_s = _restart(cluster, (attacker.target + 1) % len(cluster.members))
    return outcome


async def _attack(cluster: Cluster, row: Row, attacker: Attacker, seconds: float, outcome: Outcome) -> None:
    honest = HonestProcess(cluster.endpoints, token=attacker.token)
    try:
        await asyncio.sleep(QUIET_S)
        honest.mark()
        await asyncio.sleep(QUIET_S)
        outcome.quiet_put_p99_ms = (await honest.tell())["put"]["p99_ms"]
        before = [metrics_of(member) for member in cluster.members]
        logged = [log_bytes(member) for member in cluster.members]
        honest.mark()
        async with sampled_mib(cluster) as samples:
            began = monotonic()
            attacker.until = began + seconds
            await asyncio.wait_for(_rounds(row, attacker, outcome), ATTACK_TIMEOUT_S)
            outcome.attack_s = round(monotonic() - began, 2)
            await asyncio.sleep(AFTER_S)
            summary = await honest.tell()
        after = [metrics_of(member) for member in cluster.members]
        turns = [
            turn for member, size in zip(cluster.members, logged, strict=True) for turn in long_turns(member, size)
        ]
        outcome.work = [f"{own_ms} ms: {work}" for own_ms, work in sorted(turns, reverse=True)[:4]]
    finally:
        honest.end()
    _note(outcome, summary, before, after)
    memory = max(zip(*samples, strict=False), key=max)
    outcome.peak_mb = round(max(memory), 1)
    outcome.growth_mb = round(max(memory) - memory[0], 1)


async def _rounds(row: Row, attacker: Attacker, outcome: Outcome) -> None:
    while True:
        await row.attack(attacker)
        outcome.rounds += 1
        if not row.repeats or attacker.is_over():
            return


def _note(
    outcome: Outcome, summary: dict[str, Any], before: list[dict[str, float]], after: list[dict[str, float]]
) -> None:
    outcome.put, outcome.read = summary["put"], summary["read"]
    outcome.errors, outcome.error_texts = summary["errors"], summary["error_texts"]
    changes = [
        new[_LEADER_CHANGES] - old[_LEADER_CHANGES] for old, new in zip(before, after, strict=True) if old and new
    ]
    outcome.leader_changes = int(max(changes, default=0))
    if outcome.program == "raftkv":
        outcome.turns_ms = [round(figures.get(_LONGEST_TURN, 0.0) * 1e3, 1) for figures in after]
        outcome.turns_own_ms = [round(figures.get(_LONGEST_OWN_TURN, 0.0) * 1e3, 1) for figures in after]


async def _agreement(cluster: Cluster, token: str) -> Agreement:
    """Wait until it is there: a member may have to catch up."""
    deadline = monotonic() + 30
    while True:
        try:
            found = await agreement(cluster, token)
        except RpcError as error:
            found = Agreement(str(error))
        if not found.problem or "hashes" in found.problem or monotonic() > deadline:
            return found
        await asyncio.sleep(0.5)


def _restart(cluster: Cluster, number: int) -> float:
    member = cluster.members[number]
    member.kill()
    began = time.monotonic()
    try:
        member.start()
        member.wait_ready(timeout_s=120)
    except ProcessError as error:
        print(error, file=sys.stderr)
        return float("inf")
    return round(time.monotonic() - began, 2)
