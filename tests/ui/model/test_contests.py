"""Queues of locks and elections, out of the keys that holders and members write."""

from __future__ import annotations

import asyncio

import raftkv
import raftkv.aio
from tests.procs import wait_for
from tests.ui.model.runner import Model, event, kv


def stored(kv_client: raftkv.Client, prefix: str) -> list[dict]:
    return [
        {"kv": kv(one.key.decode(), one.value, create=one.create_revision, mod=one.mod_revision, lease=one.lease)}
        for one in kv_client.range(prefix, prefix=True)
    ]


async def test_queues_of_the_library_say_who_holds_and_who_waits(raftkv_cluster, raftkv_client, model: Model) -> None:
    async with raftkv.aio.connect(raftkv_cluster.endpoints) as kv_client, asyncio.TaskGroup() as tasks:
        first = kv_client.lock("jobs/lock")
        await first.acquire()
        waiting = tasks.create_task(kv_client.lock("jobs/lock").acquire())
        async with kv_client.campaign("jobs/leader", "node-1"):
            await asyncio.to_thread(wait_for, lambda: len(stored(raftkv_client, "jobs/lock/")) == 2, "two entries")
            events = await asyncio.to_thread(stored, raftkv_client, "jobs/")
        waiting.cancel()
        leader, lock = model.run("contests", events=events)
        assert (leader["name"], leader["kind"], leader["holder"]["value"]) == ("jobs/leader", "election", "node-1")
        assert (lock["name"], lock["kind"], lock["holder"]["token"]) == ("jobs/lock", "lock", first.fence)
        assert [one["token"] > first.fence for one in lock["waiting"]] == [True]
        await first.release()


def test_only_keys_that_are_named_by_their_lease_are_entries(model: Model) -> None:
    lease = 0x5F1
    entries = [("q/5f1", lease), ("q/5f2", lease), ("q/free", 0), ("/5f1", lease), ("5f1", lease), ("q/-5f1", lease)]
    events = [{"kv": kv(key, b"", create=number, lease=own)} for number, (key, own) in enumerate(entries, 1)]
    found = model.run("contests", events=events)
    assert [(one["name"], one["holder"]["key"], one["waiting"]) for one in found] == [
        ("", "/5f1", []),
        ("q", "q/5f1", []),
    ]


def test_the_oldest_that_is_left_holds(model: Model) -> None:
    def entry(lease: int, create: int) -> dict:
        return {"kv": kv(f"q/{lease:x}", b"", create=create, mod=create, lease=lease)}

    three = [entry(0x30, 5), entry(0x20, 7), entry(-1 & (2**63 - 1), 9)]
    (found,) = model.run("contests", events=three)
    assert (found["holder"]["lease"], [one["token"] for one in found["waiting"]]) == ("30", [7, 9])
    (found,) = model.run("contests", events=[*three, event("q/30", None, 10)])
    assert found["holder"]["lease"] == "20"
    gone = [event(f"q/{lease}", None, 11) for lease in ("30", "20", "7fffffffffffffff")]
    assert model.run("contests", events=[*three, *gone]) == []
