"""The library on a real cluster: every scenario runs against etcd 3.5.1 and against raftkv."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from raftkv.aio import Client, connect
from tests.procs import ETCD_FAST, RAFTKV, Cluster, Program

Scenario = Callable[[Client], Awaitable[Any]]


@pytest.fixture(scope="module", params=[ETCD_FAST, RAFTKV], ids=["etcd", "raftkv"])
def member(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """One member, shared by the tests of a module."""
    with Cluster(request.param) as cluster:
        yield cluster


@pytest.fixture
def play(member: Cluster, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Runs a scenario with a client whose keys are this test's alone."""
    namespace = f"{request.node.originalname}/"

    def run(scenario: Scenario, **options: Any) -> Any:
        async def main() -> Any:
            async with connect(member.endpoints, namespace=namespace, **options) as kv:
                return await asyncio.wait_for(scenario(kv), 60)

        return asyncio.run(main())

    return run


@pytest.fixture(params=[ETCD_FAST, RAFTKV], ids=["etcd", "raftkv"])
def three(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Three members, for a test that kills some."""
    program: Program = request.param
    with Cluster(program, size=3) as cluster:
        yield cluster
