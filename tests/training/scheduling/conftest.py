"""A store in memory, for each test."""

from __future__ import annotations

import pytest

from tests.training.scheduling.ledger_world import LedgerWorld


@pytest.fixture
def world() -> LedgerWorld:
    return LedgerWorld()
