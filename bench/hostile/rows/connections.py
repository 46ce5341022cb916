"""Connections: very many that do nothing, and very many that come and go."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from time import monotonic

from bench.hostile.attacker import Attacker, RawConnection
from bench.hostile.rows.row import Row
from bench.hostile.users import user_of

_CHURN_WORKERS = 16


async def _idle_and_churn(attacker: Attacker) -> None:
    """A thousand idle ones, and beside them handshakes that end at once."""
    idle: list[RawConnection] = []
    try:
        for _ in range(attacker.connections(1_000)):
            connection = await _connect(attacker)
            if connection is None:
                break
            connection.discard_answers()
            idle.append(connection)
        await asyncio.gather(*[_churn(attacker) for _ in range(_CHURN_WORKERS)])
    finally:
        attacker.notes["idle"] = len(idle)
        for connection in idle:
            connection.close()


async def _churn(attacker: Attacker) -> None:
    while not attacker.is_over():
        connection = await _connect(attacker)
        if connection is not None:
            attacker.notes["handshakes"] = attacker.notes.get("handshakes", 0) + 1
            connection.close()
        await asyncio.sleep(0.001)


async def _connect(attacker: Attacker) -> RawConnection | None:
    try:
        async with asyncio.timeout(5):
            return await attacker.connect()
    except OSError as error:  # TimeoutError is one
        attacker.refused(f"connect: {error.strerror or 'timed out'}")
        await asyncio.sleep(0.1)
        return None


async def _mallory(attacker: Attacker) -> None:
    attacker.user_token = await user_of(attacker, "mallory")


async def _page(attacker: Attacker, token: str) -> tuple[bytes, asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a page of the dashboard: the first line of the answer, and the connection."""
    host, _, port = attacker.endpoint.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET /ui/live HTTP/1.1\r\nHost: {host}\r\nAuthorization: {token}\r\n\r\n".encode())
    return await reader.readline(), reader, writer


async def _pages(attacker: Attacker) -> None:
    """Pages that one user keeps open, a hundred of them; others open theirs and see a record."""

    async def take() -> None:
        while not attacker.is_over():
            line, reader, writer = await _page(attacker, attacker.user_token)
            if b"200" not in line:
                attacker.refused(line.decode().strip())
            with suppress(TimeoutError):
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + attacker.until - monotonic()):
                    while b"200" in line and await reader.read(1 << 16):
                        pass
            writer.close()
            await asyncio.sleep(0.1)

    async def look() -> bool:
        line, reader, writer = await _page(attacker, attacker.token)
        try:
            async with asyncio.timeout(5):
                await reader.readuntil(b"data: ")
            return b"200" in line
        except (TimeoutError, asyncio.IncompleteReadError):
            return False
        finally:
            writer.close()

    await asyncio.gather(*[take() for _ in range(attacker.connections(100))], attacker.others(look))


ROWS = (
    Row("connections", "1,000 idle connections, and handshakes without end", _idle_and_churn),
    Row("share-pages", "100 pages of the dashboard of a user without permissions, while others open theirs", _pages,
        _mallory, False, ("raftkv",), users=True),
)  # fmt: skip
