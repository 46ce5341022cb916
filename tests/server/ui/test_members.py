"""Two members in one process: what their dashboards show of both, to whom, and what that costs."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from raftkv import aio
from raftkv.config import ServerConfig
from raftkv.server.member import Member
from raftkv.server.ui import figures as module
from tests.procs import free_port


def _configs(folder: Path) -> list[ServerConfig]:
    ports = {name: (free_port(), free_port()) for name in ("a", "b")}
    peers = tuple(f"{name}=http://127.0.0.1:{peer}" for name, (_, peer) in ports.items())
    return [
        ServerConfig(
            name=name,
            data_dir=str(folder / name),
            listen_client_urls=(f"http://127.0.0.1:{client}",),
            advertise_client_urls=(f"http://127.0.0.1:{client}",),
            listen_peer_urls=(f"http://127.0.0.1:{peer}",),
            initial_advertise_peer_urls=(f"http://127.0.0.1:{peer}",),
            initial_cluster=",".join(peers),
            bcrypt_cost=4,
            enable_ui=name == "a",
        )
        for name, (client, peer) in ports.items()
    ]


@contextlib.asynccontextmanager
async def _cluster(folder: Path) -> AsyncIterator[list[Member]]:
    members = [Member(config) for config in _configs(folder)]
    ready = [asyncio.Event() for _ in members]

    async def note(index: int) -> None:
        ready[index].set()

    async with asyncio.TaskGroup() as group:
        for index, member in enumerate(members):
            group.create_task(member.run(lambda _member, index=index: note(index)))
        for event in ready:
            await event.wait()
        yield members
        for member in reversed(members):
            member.stop()
    assert [member.failure for member in members] == [None, None]


def _port(member: Member) -> int:
    return int(member.config.listen_client_urls[0].rpartition(":")[2])


async def _open(member: Member, target: str, token: str = "") -> tuple[int, asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", _port(member))
    credential = f"Authorization: {token}\r\n" if token else ""
    writer.write(f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\n{credential}\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    return int(head.split()[1]), reader, writer


async def _status(member: Member, target: str, token: str = "") -> int:
    status, _, writer = await _open(member, target, token)
    writer.close()
    return status


async def _records(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    while True:
        line = await reader.readline()
        if line in (b"", b"0\r\n"):  # the last chunk
            return
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


async def _row(reader: asyncio.StreamReader, name: str, *known: str) -> dict[str, Any]:
    """The first row of a member that has all these fields."""
    async for record in _records(reader):
        for row in record["members"]:
            if row["name"] == name and all(row.get(field) is not None for field in known):
                return row
    raise AssertionError("the stream has ended")


async def _until(condition: Callable[[], bool]) -> None:
    """Wait for what a timer brings about: it is looked at in each of the loop's next turns."""
    loop = asyncio.get_running_loop()
    holds: asyncio.Future[None] = loop.create_future()

    def look() -> None:
        if condition():
            holds.set_result(None)
        else:
            loop.call_later(0.02, look)

    look()
    async with asyncio.timeout(90):
        await holds


async def _figures_come_and_go(members: list[Member]) -> None:
    first, second = members
    # A member without a dashboard tells those of others what it knows.
    assert [await _status(second, target) for target in ("/ui/", "/ui/live")] == [404, 404]
    status, reader, writer = await _open(first, "/ui/live")
    assert status == 200
    async with aio.connect(second.config.advertise_client_urls[0]) as client:
        for number in range(20):
            await client.put(f"k{number}", "v")
        row = await _row(reader, "b", "write_s", "read_s", "fsync_s", "puts_per_s", "lag")
        assert (row["reachable"], row["keys"], row["role"] in ("leader", "follower")) == (True, 20, True)
        assert 0 < row["write_s"][0] <= row["write_s"][1] < 60
        assert second._everybody._figures._timer is not None
        writer.close()
        # Without a viewer the members measure nothing and make no record.
        for member in members:
            await _until(lambda member=member: member._everybody._figures._timer is None)
            assert not member._dashboard.live.is_running
        await client.put("unmeasured", "v")
        assert second._everybody._figures.write.quantiles() is None


async def _users_are_asked(members: list[Member]) -> None:
    first = members[0]
    async with aio.connect(first.config.advertise_client_urls[0]) as client:
        await client.users.add("root", "secret-of-root")
        await client.users.grant_role("root", "root")
        await client.users.add("eve", "secret-of-eve")
        assert await _status(first, "/ui/watchers") == 200
        _, reader, writer = await _open(first, "/ui/live")
        await _row(reader, "a")
        await client.users.enable_auth()
    # A viewer without a user is cut off, and learns no more.
    assert [record async for record in _records(reader)][1:] == []
    writer.close()
    for target in ("/ui/live", "/ui/watchers"):
        assert await _status(first, target) == 401
        assert await _status(first, target, "nobody.1") == 401
    assert (await _status(first, "/ui/"), await _status(first, "/ui/about")) == (200, 200)


@pytest.mark.long
async def test_figures_are_measured_only_for_viewers(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "MEASURED_S", 1.2)
    async with _cluster(tmp_path) as members:
        await _figures_come_and_go(members)
        await _users_are_asked(members)
