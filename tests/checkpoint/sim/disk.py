"""The bytes of simulated checkpoints: files by path, and who is asked before one changes.

``SimPlace`` stands in for ``storage.place.Place`` in the parts that a simulation runs: marks, manifests, the collector.
A deletion may fail in the middle, as those of an object store do.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import ClassVar, Protocol

from raftkv.checkpoint.errors import StorageError
from raftkv.checkpoint.storage.place import Found


class Guard(Protocol):
    """A part that has something to say about bytes."""

    def writes(self, path: str, before: bytes | None, after: bytes) -> None: ...

    def deletes(self, path: str) -> None: ...


class Disk:
    """Files that outlive every process.

    Arguments:
        guard: told of every change before it happens.
        source: of its moods.

    Attributes:
        files: path to contents.
        failure: share of the deletions that fail in the middle.
    """

    def __init__(self, guard: Guard, source: random.Random) -> None:
        self.files: dict[str, bytes] = {}
        self.failure = 0.0
        self.random = source
        self._guard = guard

    def write(self, path: str, data: bytes) -> None:
        self._guard.writes(path, self.files.get(path), data)
        self.files[path] = data

    def delete(self, path: str) -> None:
        if path in self.files:
            self._guard.deletes(path)
            del self.files[path]

    def below(self, uri: str) -> list[str]:
        return sorted(path for path in self.files if path.startswith(f"{uri}/"))


class SimPlace:
    """``Place`` on the disk of the simulation that runs."""

    disk: ClassVar[Disk]

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")

    def name_below(self, uri: str) -> str:
        return uri.removeprefix(f"{self.uri}/") if uri.startswith(f"{self.uri}/") else ""

    def names(self) -> Sequence[str]:
        return sorted({path.removeprefix(f"{self.uri}/").split("/")[0] for path in self.disk.below(self.uri)})

    def list(self) -> Sequence[Found]:
        return [
            Found(path.removeprefix(f"{self.uri}/"), len(self.disk.files[path])) for path in self.disk.below(self.uri)
        ]

    def size_now(self, name: str) -> int | None:
        data = self.disk.files.get(f"{self.uri}/{name}")
        return None if data is None else len(data)

    def read(self, name: str, size_max_bytes: int = -1) -> bytes:
        data = self.disk.files[f"{self.uri}/{name}"]
        return data if size_max_bytes < 0 else data[:size_max_bytes]

    def chunks(self, name: str, size_bytes: int) -> Iterator[bytes]:
        data = self.read(name)
        yield from (data[start : start + size_bytes] for start in range(0, len(data), size_bytes))

    def exists(self, name: str) -> bool:
        return f"{self.uri}/{name}" in self.disk.files

    def write(self, name: str, data: bytes) -> None:
        self.disk.write(f"{self.uri}/{name}", data)

    def delete_tree(self) -> None:
        for path in self.disk.below(self.uri):
            if self.disk.random.random() < self.disk.failure:
                raise StorageError(f"cannot delete {path}: simulated")
            self.disk.delete(path)
