"""A folder of certificates for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.tls.room import Room


@pytest.fixture
def room(tmp_path: Path) -> Room:
    """An empty folder; the authority is made at its first use."""
    return Room(tmp_path)
