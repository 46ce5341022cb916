"""The privates of asyncio that ``raftkv.rpc.gone`` reaches into: each is held here, for the Python that runs the tests.

A failure says that this version of Python has changed: connections that are gone would stay in memory, or each open TLS
connection would take 256 KiB, and nothing else would tell.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
import weakref
from asyncio import sslproto
from typing import cast

from raftkv.rpc.gone import release, share_read_buffer
from raftkv.rpc.protocol import read_buffer

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
            " (it was _SelectorSocketTransport._read_ready_cb) and have raftkv.rpc.gone.release clear it"
        )
    finally:
        gc.enable()


class Below:
    """The socket transport below a TLS connection."""

    def __init__(self, protocol: sslproto.SSLProtocol) -> None:
        self._protocol = protocol

    def is_closing(self) -> bool:
        return False

    def get_protocol(self) -> sslproto.SSLProtocol:
        return self._protocol


def test_tls_connections_share_one_read_buffer() -> None:
    changed = (
        f"{PYTHON}: SSLProtocol does not read into _ssl_buffer_view any more, so each TLS connection has 256 KiB of its"
        " own: see raftkv.rpc.gone.share_read_buffer"
    )
    assert {"_ssl_buffer", "_ssl_buffer_view"} <= set(sslproto.SSLProtocol.__init__.__code__.co_names), changed
    protocol = sslproto.SSLProtocol.__new__(sslproto.SSLProtocol)  # without a connection
    vars(protocol).update(_ssl_buffer=bytearray(1), _ssl_buffer_view=memoryview(bytearray(1)))
    shared = read_buffer()
    share_read_buffer(cast(asyncio.BaseTransport, Below(protocol)), shared)
    assert protocol.get_buffer(-1) is shared, changed
