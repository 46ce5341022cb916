"""The pytest fixtures of raftkv, each used in a separate test suite."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]


@pytest.fixture
def suite(pytester: pytest.Pytester):
    """Run a test module in another process and return its output."""

    def run(text: str, *arguments: str, ini: str = "") -> pytest.RunResult:
        pytester.makeini(f"[pytest]\nfilterwarnings = error\n{ini}")
        pytester.makepyfile(text)
        return pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments)

    return run


@pytest.mark.long
def test_every_test_finds_the_same_cluster_empty(suite):
    result = suite(
        """
        import pytest, raftkv

        seen, kept = set(), []

        def test_one(raftkv_cluster):
            with raftkv_cluster.connect() as kv:
                assert kv.count("", prefix=True) == 0
                lease = kv.lease(60).grant()
                kv.put("a", "1", lease=lease)
                lease.stop()
            seen.add(raftkv_cluster.directory)

        def test_two(raftkv_client, raftkv_cluster):
            assert raftkv_client.count("", prefix=True) == 0
            assert raftkv_client.leases() == []
            seen.add(raftkv_cluster.directory)
            assert len(seen) == 1
            kept.append(raftkv_cluster.connect())
            kept[0].put("a", "1")

        def test_clients_of_a_test_are_closed_after_it():
            with pytest.raises(raftkv.Closed):
                kept[0].get("a")
        """
    )
    result.assert_outcomes(passed=3)


@pytest.mark.long
def test_members_that_a_test_killed_or_paused_are_back_for_the_next(suite):
    result = suite(
        """
        def test_one(raftkv_cluster):
            raftkv_cluster.members[0].kill()

        def test_two(raftkv_client, raftkv_cluster):
            raftkv_client.put("a", "1")
            raftkv_cluster.members[0].pause()

        def test_three(raftkv_client):
            assert raftkv_client.get("a") is None
        """
    )
    result.assert_outcomes(passed=3)


@pytest.mark.long
def test_size_and_flags_are_settings(suite):
    result = suite(
        """
        def test_one(raftkv_cluster, raftkv_client):
            assert len(raftkv_cluster.endpoints) == len(raftkv_client.members()) == 3
            with raftkv_client.lease(1) as lease:
                assert lease.ttl == 1
        """,
        ini="raftkv_size = 3\nraftkv_flags = --lease-min-ttl=1",
    )
    result.assert_outcomes(passed=1)


@pytest.mark.long
def test_a_cluster_that_does_not_start_says_why_in_one_line(suite):
    result = suite("def test_one(raftkv_cluster): pass", ini="raftkv_flags = --nonsense")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["raftkv_cluster: member node1 did not start: raftkv: flag provided but not defined: *"]
    )


@pytest.mark.long
def test_invalid_size_is_named(suite):
    result = suite("def test_one(raftkv_cluster): pass", ini="raftkv_size = 2")
    result.stdout.fnmatch_lines(["*a local cluster has 1, 3, 5 or 7 members, not 2*"])


@pytest.mark.long
def test_a_suite_that_does_not_use_it_starts_nothing(suite):
    result = suite("import sys\n\ndef test_one():\n    assert 'raftkv.client' not in sys.modules")
    result.assert_outcomes(passed=1)
