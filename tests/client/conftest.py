"""Fixtures for the library on real clusters: every scenario runs against etcd 3.5.1 and against raftkv."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from raftkv.aio import Client, connect
from tests.procs import ETCD_FAST, RAFTKV, Cluster, Program

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module", params=[ETCD_FAST, RAFTKV], ids=["etcd", "raftkv"])
def member(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """One member, shared by the tests of a module."""
    with Cluster(request.param) as cluster:
        yield cluster


@pytest.fixture
@asynccontextmanager
async def kv(member: Cluster, request: pytest.FixtureRequest) -> AsyncIterator[Client]:
    """A client in a key space for this test only."""
    async with connect(member.endpoints, namespace=f"{request.node.name}/") as client:
        yield client


@pytest.fixture(params=[ETCD_FAST, RAFTKV], ids=["etcd", "raftkv"])
def three(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Three members, for tests that kill some."""
    program: Program = request.param
    with Cluster(program, size=3) as cluster:
        yield cluster


SHORT_ON_ETCD = {"test_library_kv.py", "test_library_lock.py", "test_library_auth.py"}
"""Modules whose tests on one member of etcd take part in `make test`; all others on etcd are long."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the runs on etcd `long`, since the same scenarios run on raftkv."""
    for item in items:
        chosen = getattr(getattr(item, "callspec", None), "params", {})
        alone = chosen.get("member") is ETCD_FAST and item.path.name not in SHORT_ON_ETCD
        if item.path.is_relative_to(HERE) and (alone or chosen.get("three") is ETCD_FAST):
            item.add_marker(pytest.mark.long)
