"""etcd-client-py (Rust underneath): tasks that share one connection."""

from __future__ import annotations

import asyncio

from etcd_client import Client
from load import VALUE, Load


async def main() -> None:
    load = Load.from_arguments()
    async with Client([f"http://{load.endpoint}"]).connect() as client:
        calls = {
            "put": lambda key: client.put(key.encode(), VALUE),
            "get": lambda key: client.get(key.encode()),
        }
        await load.run_tasks(calls[load.operation])


asyncio.run(main())
