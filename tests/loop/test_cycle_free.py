"""The privates of asyncio that ``raftkv.loop.cycle_free`` reaches into: held here for the Python that runs the tests.

A failure says that this version of Python has changed: connections that are gone would stay in memory, and nothing else
would tell.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
import weakref

from raftkv.loop.cycle_free import release

PYTHON = f"Python {sys.version_info.major}.{sys.version_info.minor}"


def test_a_released_transport_is_freed_by_its_reference_count() -> None:
    async def scenario() -> weakref.ref[asyncio.BaseTransport]:
        ours, theirs = socket.socketpair()
        with theirs:
            transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)
            gone = weakref.ref(transport)
            transport.abort()
            await asyncio.sleep(0)  # the loop calls connection_lost in the turn after abort
            release(transport)
        return gone

    gc.disable()
    try:
        gone = asyncio.run(scenario())
        assert gone() is None, (
            f"{PYTHON}: a socket transport still refers to itself after its end; find the attribute that holds it"
            " (it was _SelectorSocketTransport._read_ready_cb) and have raftkv.loop.cycle_free.release clear it"
        )
    finally:
        gc.enable()
