"""The worlds of the tests of datasets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from raftkv.client.sync.loop import LoopThread
from raftkv.dataset.dataset import Dataset
from tests.dataset.world import World


@pytest.fixture(scope="session")
def loop() -> Iterator[LoopThread]:
    thread = LoopThread("datasets")
    yield thread
    thread.close()


@pytest.fixture
def world(loop: LoopThread) -> World:
    return World(loop)


@pytest.fixture
def data(world: World) -> Dataset:
    return world.dataset()
