"""Connections: very many that do nothing, and very many that come and go."""

from __future__ import annotations

import asyncio

from bench.hostile.attacker import Attacker, RawConnection
from bench.hostile.rows.row import Row

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


ROWS = (Row("connections", "1,000 idle connections, and handshakes without end", _idle_and_churn),)
