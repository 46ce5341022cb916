"""A registry whose checkpoints have files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.retention.kept import Kept


@pytest.fixture
def world(tmp_path: Path) -> Kept:
    return Kept(tmp_path)
