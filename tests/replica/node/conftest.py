"""One member, a follower of three."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.replica.node.node_world import World


@pytest.fixture
@asynccontextmanager
async def world() -> AsyncIterator[World]:
    yield World()
