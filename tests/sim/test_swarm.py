"""The swarm in CI: seeds with settings and faults of their own, and those that once found something."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from raftkv.storage.failpoints import SITES
from tests.long import long_except
from tests.sim.__main__ import main, summary
from tests.sim.corners import CORNERS, failpoint_corner, run_corner
from tests.sim.nemesis import DEFRAGMENTING, FAULTS, REACHED
from tests.sim.swarm import draw, run_seed, year

SEEDS_COUNT = 120
SHORT_SEEDS_COUNT = 10
CHUNK_SIZE = 10
FAILPOINT_SEEDS_MAX = 100
REGRESSIONS = Path(__file__).with_name("regressions.txt")


def run_all(seeds: range) -> None:
    reports = [run_seed(seed) for seed in seeds]
    print(summary(reports))
    bad = [f"{report.violation}\n  replay: {report.replay_command}" for report in reports if report.violation]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("first", long_except(range(1, SEEDS_COUNT + 1, CHUNK_SIZE), range(1, SHORT_SEEDS_COUNT + 1)))
def test_seeds(first: int) -> None:
    run_all(range(first, first + CHUNK_SIZE))


def regressions() -> list[tuple[str, int, str]]:
    lines = REGRESSIONS.read_text().splitlines()
    found = [line.split(maxsplit=2) for line in lines if line and not line.startswith("#")]
    return [(corner, int(seed), text) for corner, seed, text in found]


SLOW = {("operators", 897), ("late", 4), ("late", 7160008), ("compaction", 31), ("election", 8)}
"""Seeds that found bugs, and need more than a second of a processor."""


@pytest.mark.parametrize(
    ("corner", "seed", "text"), long_except(regressions(), [one for one in regressions() if one[:2] not in SLOW])
)
def test_seeds_that_found_bugs(corner: str, seed: int, text: str) -> None:
    report = run_corner(seed, corner)
    assert report.violation is None, f"again: {text}\n{report.replay_command}"


@pytest.mark.long
@pytest.mark.parametrize("corner", sorted(set(CORNERS) - {"draw", "floods", "year"}))
def test_corners(corner: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--corner", corner, "--seeds", "3"]) == 0, capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize(("seed", "duration_s"), [(1, 120.0), (4, 900.0)])
def test_a_quarter_of_an_hour_of_a_clusters_year(seed: int, duration_s: float) -> None:
    """Run the first seed, and one with an operator; ``python -m tests.sim --year`` continues the year."""
    report = run_seed(seed, replace(year(seed), duration_s=duration_s))
    assert report.violation is None, f"seed {seed}: {report.violation}"


@pytest.mark.interpreted
@pytest.mark.parametrize("seeds", long_except([1, 6], [1]))
def test_floods_hold_up_no_other_identity(seeds: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--corner", "floods", "--seeds", str(seeds)]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("name", long_except(REACHED, set(REACHED[1::9]) - {"walBeforeRepair"}))
def test_a_member_may_die_at_every_failpoint(name: str) -> None:
    for seed in range(21 if "Repair" in name else 1, FAILPOINT_SEEDS_MAX):  # a log that needs repair is met there
        report = run_seed(seed, failpoint_corner(seed, name))
        assert report.violation is None, f"seed {seed}: {report.violation}"
        if report.deaths[name]:
            return
    pytest.fail("no member came there")


def test_all_other_failpoints_are_of_an_operation_on_real_files() -> None:
    assert set(SITES) - {*REACHED, *DEFRAGMENTING} == {
        *("restoreBeforeRename", "restoreBeforeRenameLog", "snapshotAfterPiece", "snapshotBeforeCopySync")
    }


def test_members_die_while_they_defragment() -> None:
    deaths: Counter[str] = Counter()
    for seed in range(1, FAILPOINT_SEEDS_MAX):
        report = run_corner(seed, "defragment")
        assert report.violation is None, f"again: {report.replay_command}"
        deaths += report.deaths
        if set(DEFRAGMENTING) <= set(deaths):
            return
    pytest.fail(f"only {deaths}")


def test_swarm_reaches_every_fault_and_size() -> None:
    parameters = [draw(seed) for seed in range(1, 501)]
    assert {each.cluster.voters_count for each in parameters} == {1, 2, 3, 4, 5, 7}
    assert len({fault for each in parameters for fault in each.nemesis.faults}) == len(FAULTS)
    assert any(not each.nemesis.faults for each in parameters)


def test_replay_prints_parameters_first_and_traces(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "3", "--trace"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "seed = 3"
    assert lines[1].startswith("duration_s = ")
    assert any(" deliver (" in line for line in lines)
    assert lines[-1] == "0 violations"
