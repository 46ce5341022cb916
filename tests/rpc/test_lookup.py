"""Names of hosts while DNS does not answer: no caller waits for a lookup beyond its own limit, least of all an exit."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from typing import Any

import pytest

import raftkv
import raftkv.aio
from raftkv.client.errors import EndpointsFailed
from raftkv.rpc.client.connect import addresses, beside

PATIENCE_S = 120.0
DEAD_DNS = """
import asyncio, os, socket, sys, threading

def hang(host, *arguments, **more):
    assert host == "dead.invalid", host
    threading.Event().wait()

socket.getaddrinfo = hang
import raftkv, raftkv.aio, raftkv.training.aio
from raftkv.errors import StatusError
from raftkv.training import JoinTimeout

async def ask():
    async with raftkv.aio.connect("dead.invalid:2379", timeout_s=0.3) as kv:
        await kv.get("a")

async def take_part():
    await raftkv.training.aio.join("job", endpoints="dead.invalid:2379", timeout_s=0.3)

def ask_blocking():
    with raftkv.connect("dead.invalid:2379", timeout_s=0.3) as kv:
        kv.get("a")

try:
    {call}
except (StatusError, JoinTimeout) as error:
    print(type(error).__name__)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("asyncio.run(ask())", "EndpointsFailed"),
        ("ask_blocking()", "EndpointsFailed"),
        ("asyncio.run(take_part())", "JoinTimeout"),
    ],
)
def test_a_program_ends_though_a_lookup_never_does(call: str, said: str) -> None:
    program = [sys.executable, "-W", "error", "-c", DEAD_DNS.replace("{call}", call)]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert (done.stdout.strip(), done.stderr, done.returncode) == (said, "", 0)


async def test_lookups_of_one_name_share_a_thread_and_all_hear_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    go = threading.Event()

    def look_up(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        go.wait(PATIENCE_S)
        if host == "none.invalid":
            raise socket.gaierror(-2, "Name or service not known")
        if "%" in host:
            return [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", (host.partition("%")[0], port, 0, 4))]
        tcp = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        return [(*tcp, ("192.0.2.1", port)), (*tcp, ("192.0.2.1", port)), (*tcp, ("192.0.2.2", port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    first = asyncio.create_task(addresses("a.invalid", 1))
    others = [asyncio.create_task(addresses("a.invalid", 1)) for _ in range(5)]
    none = asyncio.create_task(addresses("none.invalid", 1))
    await asyncio.sleep(0)
    first.cancel()
    go.set()
    assert await asyncio.gather(*others) == [["192.0.2.1", "192.0.2.2"]] * 5
    with pytest.raises(socket.gaierror, match="not known"):
        await none
    assert sorted(asked) == ["a.invalid", "none.invalid"]
    await addresses("a.invalid", 1)
    assert asked.count("a.invalid") == 2, "what is known is not remembered: DNS may say another thing next time"
    assert [await addresses(host, 1) for host in ("127.0.0.1", "::1")] == [["127.0.0.1"], ["::1"]]
    assert await addresses("fe80::1%eth0", 1) == ["fe80::1%4"], "without its interface, the address leads nowhere"


@pytest.mark.long
@pytest.mark.parametrize("is_frozen", [False, True], ids=["without power", "frozen"])
async def test_a_name_of_several_machines_leads_to_one_that_answers(raftkv_cluster, monkeypatch, is_frozen):
    """The first address of a name that said nothing took all the time of each attempt: the others were never tried."""
    port = int(raftkv_cluster.endpoints[0].rpartition(":")[2])

    def look_up(host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in ("127.0.0.9", "127.0.0.1")]

    with socket.socket() as silent, ExitStack() as stack:
        silent.bind(("127.0.0.9", port))
        silent.listen(0 if not is_frozen else 100)
        while not is_frozen:  # until its queue is full: from then on it silently accepts no connection
            filler = stack.enter_context(socket.socket())
            filler.settimeout(0.2)
            try:
                filler.connect(("127.0.0.9", port))
            except TimeoutError:
                break
        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        async with raftkv.aio.connect(f"members.invalid:{port}", timeout_s=PATIENCE_S, dial_timeout_s=1.0) as kv:
            await kv.put("a", "1")


async def test_an_answer_after_the_end_of_the_loop_does_no_harm(capfd: pytest.CaptureFixture[str]) -> None:
    go = threading.Event()

    def work() -> None:
        go.wait(PATIENCE_S)

    waiting = asyncio.create_task(beside(work))
    await asyncio.sleep(0)
    waiting.cancel()
    workers = [thread for thread in threading.enumerate() if thread.name == "raftkv-lookup"]
    go.set()
    for worker in workers:
        worker.join(PATIENCE_S)
    assert capfd.readouterr().err == ""


async def test_a_process_without_room_for_a_thread_has_a_failed_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempt ended without a word, and the endpoint was said to be connected and not to answer."""

    class Refused(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    async with raftkv.aio.connect("named.invalid:2379", timeout_s=0.3) as kv:
        with monkeypatch.context() as patched:
            patched.setattr(threading, "Thread", Refused)
            with pytest.raises(EndpointsFailed, match="can't start new thread"):
                await kv.get("a")
        assert await addresses("localhost", 1)
