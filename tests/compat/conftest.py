"""The servers of the compatibility tests, shared by all of them, and their logs with every failure.

Rows are played on etcd 3.5.1 and on raftkv; by `make test-all` on etcd 3.5.30 too, where `make foreign` could get it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest

from tests.compat.store import Store
from tests.compat.wire import Wire
from tests.procs import ETCD_FAST, ETCD_NEWER, RAFTKV, Cluster


@pytest.fixture(scope="package")
def etcd() -> Iterator[Cluster]:
    """The oracle: real etcd 3.5.1, one member."""
    with Cluster(ETCD_FAST) as cluster:
        yield cluster


@pytest.fixture(scope="package")
def newer() -> Iterator[Cluster]:
    """The second oracle: real etcd 3.5.30, one member."""
    assert ETCD_NEWER is not None
    with Cluster(ETCD_NEWER) as cluster:
        yield cluster


@pytest.fixture(scope="package")
def raftkv() -> Iterator[Cluster]:
    """Three members of raftkv."""
    with Cluster(RAFTKV, size=3) as cluster:
        yield cluster


SERVERS = ["etcd", "raftkv"]
NEWER = [] if ETCD_NEWER is None else [pytest.param("newer", marks=pytest.mark.long)]


@pytest.fixture(scope="package", params=[*SERVERS, *NEWER])
def cluster(request: pytest.FixtureRequest) -> Cluster:
    """Each server in turn, so that what a test expects is proven on etcd itself."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="package")
def wire(cluster: Cluster) -> Iterator[Wire]:
    """Connections to every member."""
    with Wire(cluster.endpoints) as wire:
        yield wire


@pytest.fixture
def store(wire: Wire, cluster: Cluster) -> Store:
    """The store of `cluster`, emptied and compacted; revisions count from there."""
    return Store(wire, cluster.program.name)


@pytest.fixture
def raftkv_store(raftkv: Cluster) -> Iterator[Store]:
    """The same for raftkv alone, where etcd 3.5.1 has no answer: what it lacks, and what crashes it."""
    with Wire(raftkv.endpoints) as wire:
        yield Store(wire, raftkv.program.name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the tails of the servers' logs to the report of a failed test."""
    report = yield
    if report.failed:
        for value in getattr(item, "funcargs", {}).values():
            if isinstance(value, Cluster):
                report.sections.append((f"logs of {value.program.name}", value.logs()))
    return report
