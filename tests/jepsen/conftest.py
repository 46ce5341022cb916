"""Folders for the runs of these tests: on a disk, never in memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import pytest

from jepsen import db
from jepsen.db import require_disk
from jepsen.runner import RUNS
from raftkv.storage import failpoints
from tests import forked


@pytest.fixture(autouse=True)
def _forked_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start members as ``tests.procs`` does, unless a library is loaded into them."""
    launch = db.launch

    def launch_or_fork(command: list[str], environment: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        if environment.keys() - {failpoints.ENVIRONMENT} or command[:3] != db.programs()["raftkv"]:
            return launch(command, environment, log)
        return forked.start(command, cwd=db.ROOT, environment={**os.environ, **environment}, log=log)

    monkeypatch.setattr(db, "launch", launch_or_fork)


@pytest.fixture
def tmp_runs() -> Iterator[Path]:
    """A folder for the runs of a test, removed afterwards even when runs fail, because failures are expected here."""
    folder = RUNS / f"test-{uuid.uuid4().hex[:8]}"
    folder.mkdir(parents=True)
    require_disk(folder)
    yield folder
    shutil.rmtree(folder)
