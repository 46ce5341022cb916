"""The interface of workloads, and the rotation of keys that all of them need."""

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
    """The environment of a workload's companions: endpoints, recorder, and the end of the run.

    Attributes:
        seats: number of pinned companions, for workloads that have them.
    """

    endpoints: Endpoints
    seats: int
    recorder: Recorder
    ending: Ending
    seed: int


class Workload(Protocol):
    """A generator of requests, with checkers that know the meaning of the requests.

    Written values must be unique in the run (``Client.fresh_value``), because the checkers identify requests by them.
    For the same reason a txn that deletes must also put, in the same branch; a plain delete needs no such mark.

    A workload with tasks beside the load also has ``companions(scene)``, which returns them as coroutines: they run
    through all faults, and end soon after ``scene.ending`` is set.
    """

    name: str
    checkers: dict[str, Checker]

    async def step(self, client: Client) -> None:
        """Send the next request of a client, or a few related ones."""
        ...

    async def finish(self, client: Client) -> None:
        """Make the last reads, when all faults are healed and all other clients have ended."""
        ...


class Rotation:
    """A few active keys, each replaced after some operations, so that no key's history grows long.

    The time of the search for a linearization grows steeply with the operations on a key; see ``checkers/linear.py``.
    """

    def __init__(self, prefix: str, active: int, uses_max: int) -> None:
        self.used: list[str] = []
        self._prefix, self._uses_max = prefix, uses_max
        self._left: dict[str, int] = {}
        for _ in range(active):
            self._open()

    @property
    def active(self) -> list[str]:
        """Currently active keys."""
        return list(self._left)

    def take(self, key: str) -> str:
        """Count one use of an active key; it is replaced when used up."""
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
