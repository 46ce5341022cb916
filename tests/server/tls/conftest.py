"""A folder of certificates for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.tls.room import Room


@pytest.fixture
def room(tmp_path: Path) -> Room:
    """An authority and a server's certificate."""
    made = Room(tmp_path)
    made.issue("server")
    return made
