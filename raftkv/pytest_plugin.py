"""pytest fixtures: a real cluster for tests, started once and emptied before every test.

    def test_greeting(raftkv_cluster):
        with raftkv_cluster.connect() as kv:
            kv.put("greeting", b"hello")

    def test_greeting_again(raftkv_client):
        assert raftkv_client.get("greeting") is None

The plugin is installed with raftkv; pytest finds it automatically. Guarantees for a test:

1. The cluster starts when the first test uses it, and runs until the end of the session (one cluster for each worker
   under pytest-xdist): a test costs milliseconds, not a cluster start.
2. A test starts with no keys, no leases and all members running, independent of the tests before it.
3. Revisions continue from test to test. They differ between runs, so take them from responses.
4. Clients that the test opened with ``raftkv_cluster.connect()`` are closed after it.

Settings, in pytest's configuration: ``raftkv_size`` (members: 1, 3, 5, 7) and ``raftkv_flags`` (for every member). A
test that needs another size, or that damages the cluster beyond repair, should use ``raftkv.local()``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from raftkv.client.local import LocalCluster
    from raftkv.client.sync.library import Client


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register the settings."""
    parser.addini("raftkv_size", "members of the raftkv_cluster fixture: 1, 3, 5 or 7", default="1")
    parser.addini("raftkv_flags", "flags for every member of the raftkv_cluster fixture", type="args", default=[])


@pytest.fixture(scope="session")
def raftkv_session_cluster(pytestconfig: pytest.Config) -> Iterator[LocalCluster]:
    """Start the cluster of ``raftkv_cluster``, which is not reset here; for fixtures with a wider scope."""
    from raftkv.client.local import local
    from raftkv.errors import RaftKVError

    size = str(pytestconfig.getini("raftkv_size"))
    if not size.isdecimal():
        raise pytest.UsageError(f"raftkv_size must be 1, 3, 5 or 7, not {size!r}")
    try:
        cluster = local(int(size), flags=pytestconfig.getini("raftkv_flags")).start()
    except RaftKVError as error:
        pytest.fail(f"raftkv_cluster: {error}", pytrace=False)
    with cluster:
        yield cluster


@pytest.fixture
def raftkv_cluster(raftkv_session_cluster: LocalCluster) -> Iterator[LocalCluster]:
    """Yield a running cluster without keys or leases: ``.endpoints``, ``.connect()``, ``.members``."""
    raftkv_session_cluster.reset()
    yield raftkv_session_cluster
    raftkv_session_cluster.close_clients()


@pytest.fixture
def raftkv_client(raftkv_cluster: LocalCluster) -> Client:
    """Return a client of ``raftkv_cluster``, closed after the test."""
    return raftkv_cluster.connect()
