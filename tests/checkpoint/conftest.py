"""A store in memory, a registry on it, and a claim of its run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from raftkv.checkpoint.commit.claim import Claim
from raftkv.checkpoint.registry import Registry
from tests.checkpoint.world import World


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def registry(world: World) -> Registry:
    return world.registry()


@pytest.fixture
@asynccontextmanager
async def claim(registry: Registry) -> AsyncIterator[Claim]:
    yield await registry.claim()
