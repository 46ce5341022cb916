"""Members of both builds answer the same requests alike, odd ones too: one interpreted, one as this checkout runs."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import raftkv.native
from tests.compat.builds.player import INTERPRETED, clusters, play
from tests.compat.differential import requests, stream_programs
from tests.compat.gateway import streams
from tests.compat.gateway.generator import USERS, Generator
from tests.compat.gateway.requests import Player, Side, add_users
from tests.compat.wire import Wire
from tests.procs import RAFTKV, ROOT, Cluster, Program

SEED = 20_261_127


def hot_path_of(program: Program, folder: Path) -> str:
    words = [*program.command, "version"]
    done = subprocess.run(words, cwd=folder, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True)
    return done.stdout.rpartition("Hot Path: ")[2].strip()


@pytest.mark.long
def test_the_builds_are_what_they_are_called(tmp_path: Path) -> None:
    assert hot_path_of(INTERPRETED, tmp_path) == "interpreted"
    assert hot_path_of(RAFTKV, tmp_path) == ("compiled" if raftkv.native.is_compiled() else "interpreted")


@pytest.mark.long
def test_odd_requests() -> None:
    report = play(SEED, 400)
    print(report.describe())
    assert report.differences == [], report.describe()
    assert len(report.played) >= 50
    assert report.statuses["OK"] > 100
    assert report.statuses["INTERNAL"] > 50  # what cannot be read


@contextlib.contextmanager
def sides(one: Cluster, other: Cluster) -> Iterator[tuple[Side, Side]]:
    pair = Side(one.endpoints[0]), Side(other.endpoints[0])
    with contextlib.closing(pair[0]), contextlib.closing(pair[1]):
        yield pair


@pytest.mark.long
def test_the_gateway() -> None:
    with clusters() as (one, other), sides(one, other) as pair:
        assert streams.run(pair, SEED, 15) == []
        report = Player(*pair, Generator(SEED)).run(300)
        assert report.differences == [], report.describe()
        for side in pair:
            add_users(side)
        report = Player(*pair, Generator(SEED, USERS)).run(150)
        assert report.differences == [], report.describe()


@pytest.mark.long
def test_members_of_both_builds_in_one_cluster() -> None:
    """What one applies the others do: every answer, and hashes of the whole history."""
    mixed = Cluster(RAFTKV, size=3)
    mixed.members[0].server = INTERPRETED
    with mixed, Cluster(INTERPRETED) as alone, Wire(alone.endpoints) as oracle, Wire(mixed.endpoints) as tested:
        player = requests.Player(oracle, tested, SEED)
        player.run(250)
        hashes = player.hashes_of_one_history(150)
        programs = stream_programs.Player(oracle, tested, SEED).run(1)
    assert player.report.differences == [], player.report.describe()
    assert len(set(hashes)) == 1, f"HashKV of the one that is alone, then of each member: {hashes}"
    assert programs.differences == [], programs.describe()
