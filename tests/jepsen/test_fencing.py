"""Locks without and with tokens, scripted on real servers: a holder stalls longer than its lease lives."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from jepsen.checkers import lock
from jepsen.client import Client
from jepsen.history import History
from jepsen.ops import (
    RECIPES,
    Campaign,
    Compare,
    Grant,
    HeldResult,
    KeyValue,
    Lock,
    Put,
    Range,
    RangeResult,
    Request,
    Resign,
    Revoke,
    Txn,
    TxnResult,
    Unlock,
)
from tests.jepsen.stage import POLL_S, Stage, staged
from tests.long import long_except

NAME = RECIPES + "lock"
SYSTEMS = ["etcd", "raftkv"]
SHORT_S, LONG_S = 1, 60


async def locked(client: Client, lease: int, ttl_s: int) -> KeyValue:
    """Take the lock and return its key from the store."""
    await client.call(Grant(lease, ttl_s))
    held = (await client.call(Lock(NAME, lease))).result
    assert isinstance(held, HeldResult)
    read = (await client.call(Range(held.key))).result
    assert isinstance(read, RangeResult)
    return read.kvs[0]


async def stalled(stage: Stage) -> tuple[bool, History]:
    """Client a locks, reads, and stalls until b has locked and written; then a writes, once fenced and once not."""
    a, b = stage.client("a"), stage.client("b")
    held = await locked(a, 1, SHORT_S)
    await a.call(Txn((), (Range("fenced"), Range("plain"))))
    other = await locked(b, 2, LONG_S)
    assert other.create > held.create
    for key in ("fenced", "plain"):
        await b.call(guarded(key, '["b"]', other))
    fenced = (await a.call(guarded("fenced", '["a"]', held))).result
    await a.call(Put("plain", '["a"]'))
    for key in ("fenced", "plain"):
        await b.call(Range(key))
    await b.call(Unlock(other.key))
    await a.close()
    await b.close()
    assert isinstance(fenced, TxnResult)
    return fenced.succeeded, await stage.history()


def guarded(key: str, value: str, held: KeyValue) -> Request:
    """A write that requires the holder's key."""
    return Txn((Compare(held.key, "create", "=", held.create),), (Put(key, value),))


@pytest.mark.long
@pytest.mark.parametrize("system", SYSTEMS)
async def test_a_stalled_holder_destroys_an_update_unless_it_is_fenced(system: str, tmp_runs: Path) -> None:
    async with staged(system, tmp_runs) as stage:
        written, history = await stalled(stage)
    assert not written
    assert lock.lost(history, "fenced") == []
    assert lock.lost(history, "plain") == ["b"]
    assert lock.check(history) == []


async def outwaited(stage: Stage, wait: type[Lock] | type[Campaign]) -> tuple[str, History]:
    """Client b waits behind a until b's lease ends; then a unlocks. Returns how b's wait ends."""
    a, b, c = stage.client("a"), stage.client("b"), stage.client("c")
    first = await waited(a, wait, 1, LONG_S)
    # A lease so short that it ends by itself may end before b has its key in the queue, and then never has.
    await c.call(Grant(2, LONG_S))
    waiting = asyncio.create_task(b.call(request(wait, 2)))
    while not (await keys(c)) >= {f"{NAME}/1", f"{NAME}/2"}:
        assert not waiting.done(), waiting.result()
        await asyncio.sleep(POLL_S)
    await c.call(Revoke(2))
    await stage.wait_gone(c, f"{NAME}/2")
    give_up = Unlock(f"{NAME}/1") if wait is Lock else Resign(NAME, f"{NAME}/1", first, 1)
    await a.call(give_up)
    ended = await waiting
    await c.call(Put("q", c.fresh_value()))
    for client in (a, b, c):
        await client.close()
    return ended.kind, await stage.history()


async def waited(client: Client, wait: type[Lock] | type[Campaign], lease: int, ttl_s: int) -> int:
    """Hold it, with a lease of that time; the token."""
    await client.call(Grant(lease, ttl_s))
    held = (await client.call(request(wait, lease))).result
    assert isinstance(held, HeldResult)
    return held.token


def request(wait: type[Lock] | type[Campaign], lease: int) -> Request:
    """Wait for the name."""
    return Lock(NAME, lease) if wait is Lock else Campaign(NAME, lease, f"c{lease}")


async def keys(client: Client) -> set[str]:
    """Keys of the name."""
    result = (await client.call(Range(NAME + "/", NAME + "0"))).result
    return {kv.key for kv in result.kvs} if isinstance(result, RangeResult) else set()


OUTWAITED = [
    ("raftkv", Lock, []),
    ("raftkv", Campaign, []),
    ("etcd", Lock, []),
    # etcd 3.5.1 looks again at the key after waiting for a lock (its issue 11456), but not after a campaign.
    ("etcd", Campaign, ["M2 not held"]),
]


@pytest.mark.parametrize(("system", "wait", "rules"), long_except(OUTWAITED, OUTWAITED[:1]))
async def test_a_waiter_that_outlives_its_lease_does_not_hold(system, wait, rules, tmp_runs):
    async with staged(system, tmp_runs) as stage:
        kind, history = await outwaited(stage, wait)
    assert [violation.rule for violation in lock.check(history)] == rules
    assert (kind == "ok") == bool(rules)
