"""A state machine for each test."""

from __future__ import annotations

import pytest

from tests.apply.machine import Machine


@pytest.fixture
def machine() -> Machine:
    return Machine()
