"""What a workload is, and the rotation of keys that all of them need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from jepsen.checker import Checker
from jepsen.client import Client
from jepsen.endpoints import Endpoints
from jepsen.history import Recorder
from jepsen.watcher import Ending


@dataclass(frozen=True, slots=True)
class Scene:
    """The surroundings of companions of the load: whom to talk to, where to note it, and when it is over.

    Attributes:
        seats: companions that stay with one member each, where a workload has such.
    """

    endpoints: Endpoints
    seats: int
    recorder: Recorder
    ending: Ending
    seed: int


class Workload(Protocol):
    """A generator of requests and the checkers that know what the requests mean.

    Values written must be unique in the run (``Client.fresh_value``): the checkers find requests by them. For the same
    reason a txn that deletes must also put, in the same branch; a plain delete needs no such mark.

    A workload with tasks of its own beside the load has ``companions(scene)`` too, which returns them as coroutines:
    they go on through all faults, and end soon after ``scene.ending`` says so.
    """

    name: str
    checkers: dict[str, Checker]

    async def step(self, client: Client) -> None:
        """Send the next request of a client, or a few that belong together."""
        ...

    async def finish(self, client: Client) -> None:
        """Do the last reads, when all faults are healed and all other clients have ended."""
        ...


class Rotation:
    """A few keys in use, each replaced after some operations, so that no key's history grows long.

    The search for a linearization takes time that grows steeply with the operations on a key; see
    ``checkers/linear.py``.
    """

    def __init__(self, prefix: str, active: int, uses_max: int) -> None:
        self.used: list[str] = []
        self._prefix, self._uses_max = prefix, uses_max
        self._left: dict[str, int] = {}
        for _ in range(active):
            self._open()

    @property
    def active(self) -> list[str]:
        """Keys in use now."""
        return list(self._left)

    def take(self, key: str) -> str:
        """Count one use of a key in use; it is replaced when used up."""
        if key in self._left:
            self._left[key] -= 1
            if self._left[key] <= 0:
                del self._left[key]
                self._open()
        return key

    def _open(self) -> None:
        key = f"{self._prefix}{len(self.used):05d}"
        self.used.append(key)
        self._left[key] = self._uses_max
