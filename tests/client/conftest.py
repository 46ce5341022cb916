"""Fixtures for the library on real clusters: every scenario runs against etcd 3.5.1 and against raftkv."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raftkv.aio import Client, connect
from tests.procs import ETCD_FAST, RAFTKV, Cluster, Program

HERE = Path(__file__).resolve().parent
Scenario = Callable[[Client], Awaitable[Any]]


@pytest.fixture(scope="module", params=[ETCD_FAST, RAFTKV], ids=["etcd", "raftkv"])
def member(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """One member, shared by the tests of a module."""
    with Cluster(request.param) as cluster:
        yield cluster


@pytest.fixture
def play(member: Cluster, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Run a scenario with a client in a key space for this test only."""
    namespace = f"{request.node.name}/"

    def run(scenario: Scenario, **options: Any) -> Any:
        async def main() -> Any:
            async with connect(member.endpoints, namespace=namespace, **options) as kv:
                return await asyncio.wait_for(scenario(kv), 120)

        return asyncio.run(main())

    return run


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
