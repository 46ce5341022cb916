"""aetcd: tasks that share one client."""

from __future__ import annotations

import asyncio

import aetcd
from load import VALUE, Load


async def main() -> None:
    load = Load.from_arguments()
    host, port = load.address
    async with aetcd.Client(host=host, port=port) as client:
        calls = {
            "put": lambda key: client.put(key.encode(), VALUE),
            "get": lambda key: client.get(key.encode()),
        }
        await load.run_tasks(calls[load.operation])


asyncio.run(main())
