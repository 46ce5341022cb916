"""raftkv: tasks that share one client."""

from __future__ import annotations

import asyncio

from load import VALUE, Load

import raftkv.aio


async def main() -> None:
    load = Load.from_arguments()
    async with raftkv.aio.connect(load.endpoint) as client:
        calls = {"put": lambda key: client.put(key, VALUE), "get": client.get}
        await load.run_tasks(calls[load.operation])


asyncio.run(main())
