"""A text that is slow to make, shared by concurrent requests: one is made at a time.

    text = SharedText(make)         # ``await make()`` returns it, with pauses
    await text()                    # as it is after this call

Requests that come while one is made share the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


class SharedText:
    """Has a text made when it is asked for.

    Arguments:
        make: returns the text as it is now.
    """

    def __init__(self, make: Callable[[], Awaitable[bytes]]) -> None:
        self._make = make
        self._begun = 0
        """Texts that were begun."""
        self._text = (0, b"")
        """The last one that is whole, and which it is."""
        self._turn = asyncio.Lock()

    async def __call__(self) -> bytes:
        """Return the text as it is after this call."""
        begun = self._begun
        async with self._turn:
            if self._text[0] <= begun:  # no caller has begun one since
                self._begun += 1
                number = self._begun
                self._text = number, await self._make()
            return self._text[1]
