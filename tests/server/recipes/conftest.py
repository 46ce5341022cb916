"""A member with recipes, for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.server.recipes.recipes import RecipeMember


@pytest.fixture
@asynccontextmanager
async def member() -> AsyncIterator[RecipeMember]:
    """Make a member with leases 10 to 12."""
    yield RecipeMember(10, 11, 12)
