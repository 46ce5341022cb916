"""Calls, pages and pipelines while members are killed."""

from __future__ import annotations

import asyncio
import socket

import pytest

from raftkv.aio import StatusError, connect
from tests.cli.runner import run_ctl
from tests.client.waiting import until


@pytest.fixture
def frozen():
    """The endpoint of a frozen member: the kernel accepts connections, and no process reads them."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.long
async def test_a_member_that_stands_still_leaves_the_others_their_time(member, frozen):
    """By the usual limits of the library, and of the command."""
    async with connect([frozen, *member.endpoints]) as kv:
        await kv.put("k", "1")
        assert (await kv.get("k")).value == b"1"
    ran = await asyncio.to_thread(run_ctl, ["--endpoints", ",".join([frozen, *member.endpoints]), "put", "k", "2"])
    assert (ran.code, ran.output, ran.errors) == (0, b"OK\n", "")


def test_no_dial_timeout_leaves_the_limit_to_the_library(member):
    ran = run_ctl(["--endpoints", *member.endpoints, "--dial-timeout=0s", "put", "k", "3"])
    assert (ran.code, ran.output) == (0, b"OK\n")


@pytest.mark.long
async def test_calls_continue_and_acknowledged_writes_survive(three):
    """Every member in turn is killed under a steady load; an indefinite failure may or may not have happened."""
    acknowledged, doubtful = {}, set()

    async def write(kv, name, stop):
        number = 0
        while not stop.is_set():
            number += 1
            key = f"k/{name}/{number:05}"
            try:
                acknowledged[key.encode()] = (await kv.put(key, str(number))).revision
            except StatusError as error:
                if not error.definite:
                    doubtful.add(key.encode())

    async with connect(three.endpoints, timeout_s=10) as kv:
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for name in range(4):
                group.create_task(write(kv, name, stop))
            for member in three.members:
                await kv.get("k")
                await asyncio.to_thread(member.kill)
                await kv.get("k")
                await asyncio.to_thread(member.restart)
                # Puts that were under way as the leader died wait until its members give them up.
                enough = len(acknowledged) + 20
                await until(lambda enough=enough: len(acknowledged) >= enough)
            stop.set()
        there = {item.key: item.mod_revision async for item in kv.scan("k/", prefix=True)}
    assert acknowledged.items() <= there.items()
    assert there.keys() - acknowledged.keys() <= doubtful
    assert len(acknowledged) > 50


@pytest.mark.long
async def test_paging_continues_at_another_member(three):
    async with connect(three.endpoints, timeout_s=20) as kv:
        await kv.put_many((f"p/{number:04}", "v") for number in range(300))
        keys = []

        async def put_surely():
            try:
                return await kv.put("p/0299", "later")
            except StatusError:
                return None

        async for page in kv.pages("p/", prefix=True, page_size=50):
            keys += [item.key for item in page]
            if len(keys) == 100:
                await asyncio.to_thread(three.members[0].kill)
                await until(put_surely)
        assert keys == [b"p/%04d" % number for number in range(300)]


@pytest.mark.long
async def test_a_paused_member_is_left(three):
    """A member that accepts and does not answer costs one deadline, not every call."""
    async with connect(three.endpoints, timeout_s=2) as kv:
        await kv.put("k", "v")
        async with kv.lease(ttl=15) as lease:
            first = three.members[0]
            first.process.send_signal(19)  # SIGSTOP
            try:
                failures = 0
                while kv.scope.core.endpoint == first.endpoint:
                    try:
                        await kv.get("k")
                    except StatusError:
                        failures += 1
                assert failures <= 1
                async with asyncio.timeout(90):
                    while (await kv.get("k", timeout_s=10)) is None:
                        pass
                lease.check()
            finally:
                first.process.send_signal(18)  # SIGCONT
