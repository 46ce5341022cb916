"""What all connections of a gateway may hold together: requests that are not done, and answers that are not read.

Each connection has limits of its own; thousands of them together need one more. When a budget is exceeded, the
connection that holds most is closed, of equals the one that has held it longest: whoever asks for little and reads its
answers is never the one.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

REQUEST_BYTES_MAX: Final = 256 * 1024 * 1024
ANSWER_BYTES_MAX: Final = 256 * 1024 * 1024


class Holder(Protocol):
    """A connection."""

    def refuse(self, reason: str) -> None:
        """Close it at once."""


class Budget:
    """Bytes of one kind.

    Arguments:
        limit_bytes: of all holders together.
        what: is held, for the log.
    """

    def __init__(self, limit_bytes: int, what: str) -> None:
        self.total = 0
        self._limit_bytes = limit_bytes
        self._what = what
        self._held: dict[Holder, int] = {}
        """In the order in which they began to hold something."""

    def hold(self, holder: Holder, size_bytes: int) -> None:
        """Say how much a connection holds now; 0: nothing. May close a connection, this one or another.

        Arguments:
            holder: the connection.
            size_bytes: of all that waits for it.
        """
        self.total += size_bytes - self._held.get(holder, 0)
        if not size_bytes:
            self._held.pop(holder, None)
            return
        self._held[holder] = size_bytes
        while self.total > self._limit_bytes:
            greediest = max(self._held, key=self._held.__getitem__)
            held_bytes = self._held.pop(greediest)
            self.total -= held_bytes
            greediest.refuse(
                f"it holds {held_bytes} bytes of {self._what}, more than any other, and all connections together more "
                f"than the limit of {self._limit_bytes}"
            )


class Budgets:
    """Those of one gateway.

    Arguments:
        request_bytes, answer_bytes: the limits.

    Attributes:
        listing: held while a list of all keys is read and put together, by one connection at a time: until it is
            written, it is counted by nobody, and it may have a million keys.
    """

    def __init__(self, request_bytes: int = REQUEST_BYTES_MAX, answer_bytes: int = ANSWER_BYTES_MAX) -> None:
        self.requests = Budget(request_bytes, "requests that are not done")
        self.answers = Budget(answer_bytes, "answers that it does not read")
        self.listing = asyncio.Lock()

    def forget(self, holder: Holder) -> None:
        """Drop the account of a connection that has ended."""
        self.requests.hold(holder, 0)
        self.answers.hold(holder, 0)
