"""Log lines for operators: leader changes, lost and reconnected members, time without a leader."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jepsen.db import free_port
from tests.procs import RAFTKV, Cluster, Member, wait_for


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(RAFTKV, size=3) as cluster:
        yield cluster


def lines(member: Member, text: str) -> list[str]:
    return [line for line in member.log_path.read_text().splitlines() if text in line]


def wait_line(member: Member, text: str, count: int = 1, timeout_s: float = 30.0) -> None:
    wait_for(lambda: len(lines(member, text)) >= count, f"{text!r} in the log of {member.name}", timeout_s)


@pytest.mark.long
def test_leaders_peers_and_outages_are_told_in_a_line_each(cluster: Cluster) -> None:
    members = cluster.members
    for member in members:
        wait_line(member, "connected to member ", 2)
        wait_line(member, "ready to serve client requests")
    (leader,) = [member for member in members if lines(member, "this member became leader in term ")]
    followers = [member for member in members if member is not leader]
    for follower in followers:
        wait_line(follower, f"{leader.name} (")
    leader.kill()
    for follower in followers:
        wait_line(follower, "lost the connection to member ")
        wait_line(follower, "no leader in term ")
        wait_line(follower, " became leader in term ", 2)
    leader.restart()
    for follower in followers:
        wait_line(follower, "connected to member ", 3)
    for member in members[1:]:
        member.kill()
    wait_line(
        members[0], "no leader for 5 s: writes and linearizable reads wait; 1 of 3 voters are connected, a quorum is 2"
    )
    assert len(lines(members[0], "lost the connection")) <= 4


@pytest.mark.long
def test_a_member_that_the_others_cannot_reach_is_told_on_both_sides(cluster: Cluster) -> None:
    *others, lone = cluster.members
    for member in cluster.members:
        wait_line(member, "connected to member ", 2)
    lone.kill()
    lone.flags += ["--listen-peer-urls", f"http://127.0.0.1:{free_port()}"]
    lone.start()
    wait_line(lone, "3 of 3 voters are connected, a quorum is 2; connected, but do not reach this member: ")
    for other in others:
        wait_line(other, f":{lone.peer_port} for 5 s (connection error: ")
