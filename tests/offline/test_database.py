"""Copies of databases for a new cluster."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from raftkv.offline.database import copy_database
from raftkv.storage.backend.base import WriteBatch
from raftkv.storage.backend.lmdb import LMDBBackend
from tests.offline.directory import DataDirectory, put


def test_few_large_records_are_in_memory_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches were 10,000 records of any size: a restore of values of 1 MB took 10 GB of memory."""
    directory = DataDirectory(tmp_path / "old", segment_bytes=1 << 24)
    directory.write([put(b"%d" % number, bytes(1_000_000)) for number in range(24)])
    directory.mark()
    directory.close()
    sizes: list[int] = []
    commit = LMDBBackend.commit

    def noted(backend: LMDBBackend, batch: WriteBatch) -> None:
        sizes.append(sum(map(len, batch.records.values())))
        commit(backend, batch)

    monkeypatch.setattr(LMDBBackend, "commit", noted)
    with closing(LMDBBackend(tmp_path / "new")) as backend:
        assert copy_database(tmp_path / "old/member/snap/db", backend)[0] == 24
    assert sum(sizes) > 24_000_000
    assert max(sizes) < 20_000_000
