"""The requests of a body, one after the other, serialized for the handlers of gRPC."""

from __future__ import annotations

from typing import Any

from raftkv.loop.scheduler import Slices
from raftkv.pb.services import Method
from raftkv.server.gateway.decoder import Reader

SMALL_BYTES = 256
"""Bodies that are read at once, however many have come in one turn of the loop."""

BYTES_A_KEY = 64
"""What the slices count as one key's work."""


class Requests:
    """Reads a body; a large or odd one in the time that the member gives to long work.

    Arguments:
        body: whole.
        slices: the long work of the member.
    """

    def __init__(self, body: bytes, slices: Slices) -> None:
        self._body = body
        self._reader = Reader(body)
        self._slices = slices

    async def only(self, method: Method) -> bytes:
        """Return the one request; empty if there is none. What follows it is left alone.

        Arguments:
            method: takes it.

        Raises:
            JsonError: it is none.
        """
        message = await self._read(method, is_last=True)
        return b"" if message is None else message.SerializeToString()

    async def next(self, method: Method) -> bytes | None:
        """Return the next request; None at the end.

        Arguments:
            method: takes it.

        Raises:
            JsonError: it is none.
        """
        message = await self._read(method, is_last=False)
        return None if message is None else message.SerializeToString()

    @property
    def are_over(self) -> bool:
        """Whether nothing is left."""
        return self._reader.is_at_end

    async def _read(self, method: Method, is_last: bool) -> Any:
        work = self._reader.next(method.request, is_last=is_last)
        if len(self._body) <= SMALL_BYTES:
            try:
                next(work)  # usual bodies are read here, without a pause
            except StopIteration as done:
                return done.value
        return await self._slices.result(lambda: work, len(self._body) // BYTES_A_KEY)
