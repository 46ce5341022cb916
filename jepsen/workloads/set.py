"""A set: every client adds unique keys; the read at the end must show all acknowledged ones."""

from __future__ import annotations

from jepsen.checker import Checker
from jepsen.checkers import sets
from jepsen.client import Client
from jepsen.ops import Put, Range

_PREFIX, _END = "s/", "s0"


class Set:
    """Unique puts and one last read."""

    name = "set"

    def __init__(self) -> None:
        self.checkers: dict[str, Checker] = {"set": lambda history: sets.check(history, _PREFIX)}

    async def step(self, client: Client) -> None:
        """Add one element."""
        value = client.fresh_value()
        await client.call(Put(_PREFIX + value, value))

    async def finish(self, client: Client) -> None:
        """Read the whole set."""
        await client.call(Range(_PREFIX, _END))
