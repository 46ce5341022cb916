"""One row with one program: fresh members, data, an honest client, the attack, and the outcome."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, Final

from bench.hostile.attacker import CALL_TIMEOUT_S, Attacker, UserChannel, secure
from bench.hostile.honest import HonestProcess
from bench.hostile.rows import Row
from bench.report import markdown
from bench.stage import memory_mib, number_of_leader, pids_of
from raftkv.cli.ctl import top
from raftkv.client.rpc import methods
from raftkv.pb import rpc_pb2
from raftkv.rpc.status import RpcError
from tests.procs import Cluster, Member, Program

SIZE: Final = 3
QUIET_S: Final = 1.0
AFTER_S: Final = 0.5
ATTACK_TIMEOUT_S: Final = 240.0
AGREEMENT_TIMEOUT_S: Final = 30.0
SAMPLE_INTERVAL_S: Final = 0.1
TURN_LIMIT_MS: Final = 50.0
LEADER_CHANGES: Final = "etcd_server_leader_changes_seen_total"
_LONGEST_TURN: Final = "raftkv_loop_turn_longest_seconds"
_LONGEST_OWN_TURN: Final = "raftkv_loop_turn_longest_own_seconds"
_LONG_TURN: Final = re.compile(r"slow turn of the event loop: \d+ ms, (\d+) ms without waits for a CPU, in ([^;\"\n]*)")


@dataclass
class Outcome:
    """The outcome of one row with one program. Times in milliseconds unless the name says otherwise.

    Attributes:
        turns_ms, turns_own_ms: longest turn of each member of raftkv, by the clock, and without waits for a processor
            that others used.
        put, read: count, p50_ms, p99_ms, max_ms of the honest client.
        errors: errors of the honest client.
        peak_mb, growth_mb: anonymous memory of the largest member, and its growth since before the attack.
        details: further results that do not fit into the table, one per line.
        problem: why the members are not healthy: one died, or they differ; empty: no problem.
    """

    row: str
    program: str
    turns_ms: list[float] = field(default_factory=list)
    turns_own_ms: list[float] = field(default_factory=list)
    put: dict[str, float] = field(default_factory=dict)
    read: dict[str, float] = field(default_factory=dict)
    errors: int = 0
    attack_s: float = 0.0
    leader_changes: int = 0
    peak_mb: float = 0.0
    growth_mb: float = 0.0
    details: list[str] = field(default_factory=list)
    problem: str = ""


# ---- data from members


def metrics_of(member: Member) -> dict[str, float]:
    """Return the sums of all metrics of a member by name; empty without an answer. A scrape resets the longest turn."""
    try:
        return top.fetch(member.endpoint, None, CALL_TIMEOUT_S)
    except OSError:
        return {}


def elections(before: Sequence[dict[str, float]], after: Sequence[dict[str, float]]) -> int:
    """Return the number of leader changes that members saw between two readings of their metrics."""
    pairs = [(old, new) for old, new in zip(before, after, strict=True) if old and new]
    return int(max((new[LEADER_CHANGES] - old[LEADER_CHANGES] for old, new in pairs), default=0))


def _long_turns(member: Member, since_bytes: int) -> list[tuple[int, str]]:
    """Return long turns from a member's log, from a given offset on: their own milliseconds, and what ran in them."""
    text = member.log_path.read_bytes()[since_bytes:].decode("utf-8", errors="replace")
    return [(int(found[1]), found[2]) for found in _LONG_TURN.finditer(text)]


@asynccontextmanager
async def _sampled_mib(cluster: Cluster) -> AsyncIterator[list[list[float]]]:
    """Sample the members' private memory during the block."""
    samples: list[list[float]] = []

    async def sample() -> None:
        while True:
            with suppress(OSError, KeyError):  # the member has died
                samples.append([memory_mib(pid)["RssAnon"] for pid in pids_of(cluster)])
            await asyncio.sleep(SAMPLE_INTERVAL_S)

    task = asyncio.create_task(sample())
    try:
        yield samples
    finally:
        task.cancel()


async def agreement(cluster: Cluster, token: str = "") -> str:
    """Return why the members are not alive and equal; empty: they are. A member may take a while to catch up."""
    deadline = monotonic() + AGREEMENT_TIMEOUT_S
    while True:
        try:
            problem = await _difference(cluster, token)
        except RpcError as error:
            problem = f"a member does not serve: {error}"
        if not problem or "hashes" in problem or monotonic() > deadline:
            return problem
        await asyncio.sleep(0.5)


async def _difference(cluster: Cluster, token: str) -> str:
    """Read the leader and the hash of one revision from every member, after a linearizable read of each."""
    for member in cluster.members:
        if not member.is_running():
            return f"{member.name} died: {member.log_tail()}"
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(UserChannel(each, token)) for each in cluster.endpoints]

        async def ask(method: Any, request: Any) -> list[Any]:
            data = [await each.unary(method.path, request.SerializeToString(), CALL_TIMEOUT_S) for each in channels]
            return [method.response.FromString(one) for one in data]

        revision = min(one.header.revision for one in await ask(methods.RANGE, rpc_pb2.RangeRequest(key=b"honest/")))
        leaders = {one.leader for one in await ask(methods.STATUS, rpc_pb2.StatusRequest())}
        hashes = [(one.hash, one.compact_revision)
                  for one in await ask(methods.HASH_KV, rpc_pb2.HashKVRequest(revision=revision))]  # fmt: skip
    if len(leaders) > 1:
        return f"members name different leaders: {sorted(leaders)}"
    return f"members have different hashes at revision {revision}: {hashes}" if len(set(hashes)) > 1 else ""


# ---- a row


async def measure(row: Row, program: Program, scale: float, seconds: float) -> Outcome:
    """Run a row. Misbehaviour of the members is in the outcome; a failure of the benchmark raises."""
    outcome = Outcome(row.name, program.name)
    with Cluster(program, SIZE) as cluster:
        attacker = Attacker(cluster.endpoints, number_of_leader(cluster), scale)
        try:
            attacker.token = await secure(attacker.endpoint) if row.users else ""
            await asyncio.wait_for(row.prepare(attacker), ATTACK_TIMEOUT_S)
            await _attack(cluster, row, attacker, seconds, outcome)
        except TimeoutError:
            outcome.problem = f"longer than {ATTACK_TIMEOUT_S:g} s"
        finally:
            await attacker.close()
        outcome.details += [f"refused {count} times: {text}" for text, count in attacker.refusals.most_common(5)]
        outcome.problem = outcome.problem or await agreement(cluster, attacker.token)
    return outcome


async def _attack(cluster: Cluster, row: Row, attacker: Attacker, seconds: float, outcome: Outcome) -> None:
    honest = HonestProcess(cluster.endpoints, token=attacker.token)
    try:
        await asyncio.sleep(QUIET_S)
        before = [metrics_of(member) for member in cluster.members]
        logged = [member.log_path.stat().st_size for member in cluster.members]

        async def attack() -> None:
            began = monotonic()
            attacker.until = began + seconds
            await asyncio.wait_for(row.repeat(attacker), ATTACK_TIMEOUT_S)
            outcome.attack_s = monotonic() - began
            await asyncio.sleep(AFTER_S)

        async with _sampled_mib(cluster) as samples:
            told, _ = await honest.window(attack)
    finally:
        honest.end()
    after = [metrics_of(member) for member in cluster.members]
    outcome.put, outcome.read, outcome.errors = told["put"], told["read"], told["errors"]
    outcome.leader_changes = elections(before, after)
    if outcome.program == "raftkv":
        outcome.turns_ms = [figures.get(_LONGEST_TURN, 0.0) * 1e3 for figures in after]
        outcome.turns_own_ms = [figures.get(_LONGEST_OWN_TURN, 0.0) * 1e3 for figures in after]
    turns = [turn for each in map(_long_turns, cluster.members, logged) for turn in each]
    outcome.details += [f"long turn: {own_ms} ms: {work}" for own_ms, work in sorted(set(turns), reverse=True)[:4]]
    outcome.details += [f"honest error: {text}" for text in told["error_texts"][:3]]
    memory = max(zip(*samples, strict=False), key=max)
    outcome.peak_mb, outcome.growth_mb = max(memory), max(memory) - memory[0]


# ---- bars, and the table


def together(rounds: Sequence[Outcome]) -> Outcome:
    """Combine several rounds of one program: the one with the median honest p99, with the worst of all other bars."""
    by_latency = sorted(rounds, key=lambda outcome: outcome.put.get("p99_ms", float("inf")))
    return replace(
        by_latency[(len(rounds) - 1) // 2],
        turns_ms=[max(turns) for turns in zip(*(outcome.turns_ms for outcome in rounds), strict=False)],
        turns_own_ms=[max(turns) for turns in zip(*(outcome.turns_own_ms for outcome in rounds), strict=False)],
        errors=sum(outcome.errors for outcome in rounds),
        leader_changes=max(outcome.leader_changes for outcome in rounds),
        problem=next((outcome.problem for outcome in rounds if outcome.problem), ""),
    )


def misses(raftkv: Outcome, etcd: Outcome | None) -> list[str]:
    """Return the bars that a row of raftkv misses."""
    found = [raftkv.problem] if raftkv.problem else []
    if raftkv.turns_own_ms and max(raftkv.turns_own_ms) > TURN_LIMIT_MS:
        found.append(f"a turn of {max(raftkv.turns_own_ms):.0f} ms")
    if raftkv.leader_changes:
        found.append(f"{raftkv.leader_changes} changes of leader")
    if raftkv.errors:
        found.append(f"{raftkv.errors} honest errors")
    if etcd is not None and not etcd.problem and raftkv.put and raftkv.put["p99_ms"] > etcd.put["p99_ms"]:
        found.append(f"honest p99 {raftkv.put['p99_ms']:.1f} ms, etcd's {etcd.put['p99_ms']:.1f}")
    return found


HEADINGS: Final = (
    "row", "program", "misses", "turn ms", "own ms", "put p50", "p99", "max ms", "read p99", "attack s", "leader",
    "peak MB",
)  # fmt: skip


def table(found: Sequence[dict[str, Outcome]]) -> str:
    """Return one line for each program of each row, with the bars that raftkv misses."""
    lines = []
    for programs in found:
        for one in programs.values():
            is_ours = one.program == "raftkv"
            missed = "; ".join(misses(one, programs.get("etcd"))) if is_ours else one.problem
            turns = (f"{max(turns):,.0f}" if turns else "" for turns in (one.turns_ms, one.turns_own_ms))
            times = (f"{one.put[name]:,.1f}" if one.put else "" for name in ("p50_ms", "p99_ms", "max_ms"))
            read, memory = one.read.get("p99_ms", 0.0), f"{one.peak_mb:,.0f} (+{one.growth_mb:,.0f})"
            rest = (f"{read:,.1f}", f"{one.attack_s:.1f}", one.leader_changes, memory)
            lines.append((one.row, one.program, missed or "-", *turns, *times, *rest))
    return markdown(HEADINGS, lines, texts=3)
