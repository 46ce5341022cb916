"""Bodies of answers that are made while the client reads them.

A body ends its exchange, and with it the call and what its answer takes of the budget, when it is closed: at its end,
or when the client leaves. What is long to write is written by the member's slices, so no body holds the loop up.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator
from copy import copy
from typing import Final

from raftkv.loop.scheduler import Slices, Work
from raftkv.server.gateway.exchange import Exchange

CHUNK_BYTES: Final = 64 * 1024
"""About how much is written at once, and how much waits for the socket beside what that holds."""

KEYS_A_CHUNK: Final = 256
"""What a chunk is to the slices: little work, in turn with all other work."""


class Chunks:
    """Text that a generator makes, in chunks.

    Arguments:
        text: makes it.
        slices: the long work of the member.
    """

    def __init__(self, text: Generator[str, None, None], slices: Slices) -> None:
        self._text = text
        self._slices = slices

    async def next(self) -> bytes:
        """Return the next chunk; empty at the end."""
        return await self._slices.result(self._chunk, KEYS_A_CHUNK)

    def _chunk(self) -> Work[bytes]:
        parts: list[str] = []
        size = 0
        for part in self._text:
            parts.append(part)
            size += len(part)
            if size >= CHUNK_BYTES:
                break
            if len(parts) % 16 == 0:
                yield
        return "".join(parts).encode()

    def close(self) -> None:
        """Write no more."""
        self._text.close()


class LargeBody(AsyncIterator[bytes]):
    """The body of one large answer.

    Arguments:
        exchange: whose answer it is; closed with the body.
        chunks: of the body.
    """

    def __init__(self, exchange: Exchange, chunks: Chunks) -> None:
        self._exchange = exchange
        self._chunks = chunks
        exchange.on_given_up = chunks.close

    async def __anext__(self) -> bytes:
        chunk = await self._chunks.next()
        if self._exchange.error is not None:
            raise copy(self._exchange.error)  # what is raised holds the frames that hold this
        if not chunk:
            await self.aclose()
            raise StopAsyncIteration
        self._exchange.account.left_bytes += len(chunk)
        return chunk

    async def aclose(self) -> None:
        """The client has it all, or has left."""
        self._chunks.close()
        self._exchange.close()
