"""The first connection of a client: endpoints race for it, each with a head start on the next (RFC 8305, section 5).

So an endpoint that says nothing, as of a frozen member or of a machine without power, costs a client its head start
and not a dial timeout. The first endpoint wins whenever it is well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from raftkv.client.rpc.endpoints import Endpoint
    from raftkv.client.rpc.transport import Transport

HEAD_START_S: Final = 0.25


async def race(
    endpoints: Sequence[Endpoint], open_transport: Callable[[Endpoint], Transport]
) -> tuple[Endpoint | None, dict[Endpoint, Transport]]:
    """Return which endpoint has a connection first, and its transport; the others are closed.

    If none gets one, all transports are kept, for they know why; the winner is None.

    Arguments:
        endpoints: in order of preference.
        open_transport: makes the transport to one.
    """
    opened: dict[Endpoint, Transport] = {}
    attempts: dict[Endpoint, asyncio.Task[bool]] = {}
    keep: set[Endpoint] = set()
    waiting = list(endpoints)
    try:
        while waiting or any(not attempt.done() for attempt in attempts.values()):
            if waiting:
                endpoint = waiting.pop(0)
                opened[endpoint] = open_transport(endpoint)
                attempts[endpoint] = asyncio.ensure_future(opened[endpoint].first_attempt())
            pending = [attempt for attempt in attempts.values() if not attempt.done()]
            await asyncio.wait(pending, timeout=HEAD_START_S if waiting else None, return_when=asyncio.FIRST_COMPLETED)
            for endpoint, attempt in attempts.items():
                if attempt.done() and attempt.result():
                    keep.add(endpoint)
                    return endpoint, {endpoint: opened[endpoint]}
        keep.update(opened)
        return None, opened
    finally:
        for attempt in attempts.values():
            attempt.cancel()
        for endpoint in opened.keys() - keep:
            await opened[endpoint].close()
