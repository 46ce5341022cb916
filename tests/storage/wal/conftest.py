"""A disk in memory, and a new log on it."""

from __future__ import annotations

import pytest

from raftkv.storage.wal import WAL
from tests.storage.wal.helpers import create
from tests.storage.wal.simdisk import SimDisk


@pytest.fixture
def disk() -> SimDisk:
    return SimDisk()


@pytest.fixture
def wal(disk: SimDisk) -> WAL:
    return create(disk)
