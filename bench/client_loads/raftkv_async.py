"""raftkv: tasks that share one client."""

from __future__ import annotations

import asyncio

import raftkv.aio
from load import VALUE, Load


async def main() -> None:
    load = Load.from_arguments()
    async with raftkv.aio.connect(load.endpoint) as client:
        calls = {"put": lambda key: client.put(key, VALUE), "get": client.get}
        await load.run_tasks(calls[load.operation])


asyncio.run(main())
