"""Engines for the storage tests: every test that takes ``engine`` or ``backend`` runs on both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from raftkv.storage.backend.base import Backend
from raftkv.storage.backend.lmdb import LMDBBackend
from raftkv.storage.failpoints import disarm_all
from tests.storage.memory import MemoryBackend

MAP_SIZE_BYTES = 64 << 20


class Engine:
    """A database that can be reopened after its store died."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._memory = MemoryBackend()
        self._open: LMDBBackend | None = None

    def backend(self) -> Backend:
        """The database, freshly opened (LMDB) or as it was left (memory)."""
        self.close()
        if self.path is None:
            return self._memory
        self._open = LMDBBackend(self.path, MAP_SIZE_BYTES)
        return self._open

    def close(self) -> None:
        self._memory.close()
        if self._open is not None:
            self._open.close()
            self._open = None


@pytest.fixture(params=["memory", "lmdb"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path / "db" if request.param == "lmdb" else None)
    yield engine
    engine.close()


@pytest.fixture
def backend(engine: Engine) -> Backend:
    return engine.backend()


@pytest.fixture(autouse=True)
def _disarm() -> Iterator[None]:
    yield
    disarm_all()
