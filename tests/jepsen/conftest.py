"""Where the runs of these tests live: on a disk, never in memory."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from jepsen.db import require_disk
from jepsen.runner import RUNS


@pytest.fixture
def tmp_runs() -> Iterator[Path]:
    """A folder for the runs of one test, removed afterwards: here failed runs are what is wanted."""
    folder = RUNS / f"test-{uuid.uuid4().hex[:8]}"
    folder.mkdir(parents=True)
    require_disk(folder)
    yield folder
    shutil.rmtree(folder)
