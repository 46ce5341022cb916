"""One browser and one cluster of three real members for the dashboard's tests, which run on its thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.procs import RAFTKV, Cluster
from tests.ui.browser.chromium import Chromium
from tests.ui.browser.world import World

_key = pytest.StashKey[Chromium]()


@pytest.fixture(scope="package")
def chromium(request: pytest.FixtureRequest) -> Iterator[Chromium]:
    with Chromium() as browser:
        request.config.stash[_key] = browser
        yield browser


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    with Cluster(RAFTKV, size=3) as three:
        yield three


@pytest.fixture(scope="package")
def world(cluster: Cluster) -> Iterator[World]:
    with World(cluster.endpoints) as filled:
        yield filled


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that uses the browser on the browser's thread."""
    if "chromium" not in pyfuncitem.fixturenames:
        return None
    names = pyfuncitem._fixtureinfo.argnames
    browser = pyfuncitem.config.stash[_key]
    browser.run(pyfuncitem.obj, **{name: pyfuncitem.funcargs[name] for name in names})
    return True
