"""``raftkvctl downgrade`` has etcdctl 3.6's words; etcdctl 3.5.1, with which other commands are compared, lacks it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli.runner import run_ctl
from tests.procs import RAFTKV, Cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(RAFTKV) as cluster:
        yield cluster


def test_a_job_from_begin_to_end(cluster: Cluster) -> None:
    def run(text: str) -> tuple[int, bytes, str]:
        ran = run_ctl(["--endpoints", cluster.endpoints[0], *text.split()])
        return ran.code, ran.output, ran.errors

    assert run("downgrade cancel") == (0, b"Downgrade cancel success, cluster version 3.7\n", "")
    assert run("downgrade validate 3.6") == (0, b"Downgrade validate success, cluster version 3.7\n", "")
    assert run("downgrade enable 3.6") == (0, b"Downgrade enable success, cluster version 3.7\n", "")
    busy = "Error: etcdserver: cluster has a downgrade job in progress\n"
    assert run("downgrade enable 3.5.0") == (1, b"", busy)
    assert run("downgrade enable 3.6") == (1, b"", "Error: etcdserver: invalid downgrade target version\n")
    assert b"3.6.0 |" in run("endpoint status -w table")[1]
    assert run("downgrade cancel") == (0, b"Downgrade cancel success, cluster version 3.6\n", "")
    assert run("downgrade validate 3.5") == (1, b"", "Error: etcdserver: invalid downgrade target version\n")
    assert run("downgrade validate y") == (1, b"", "Error: etcdserver: wrong downgrade target version format\n")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["validate"], "TARGET_VERSION not provided"),
        (["enable", "3.5", "3.4"], "too many arguments"),
        (["enable", ""], "target version not provided"),
    ],
)
def test_invalid_version_is_not_sent(words: list[str], text: str) -> None:
    ran = run_ctl(["--endpoints", "127.0.0.1:1", "downgrade", *words])
    assert (ran.code, ran.output, ran.errors) == (128, b"", f"Error: {text}\n")
