"""Tests that use a real cluster, by the fixtures that come with raftkv: ``pytest examples/test_with_pytest.py``."""

from __future__ import annotations

import raftkv


def test_a_client_of_an_empty_cluster(raftkv_client: raftkv.Client) -> None:
    """Every test finds the cluster without keys."""
    assert raftkv_client.count("", prefix=True) == 0
    raftkv_client.put("greeting", "hello")


def test_keys_of_another_test_are_gone(raftkv_client: raftkv.Client) -> None:
    """Independent of the test before."""
    assert raftkv_client.get("greeting") is None


def test_a_program_that_outlives_a_member(raftkv_cluster: raftkv.LocalCluster) -> None:
    """A member may be killed: the next test finds it running again."""
    with raftkv_cluster.connect() as kv:
        kv.put("greeting", "hello")
        raftkv_cluster.members[0].kill()
        raftkv_cluster.members[0].restart()
        item = kv.get("greeting")
        assert item is not None
        assert item.text == "hello"
