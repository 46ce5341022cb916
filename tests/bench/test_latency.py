"""The stages of a put, from stamps that were made up and from those of real members."""

from __future__ import annotations

import json
from pathlib import Path
from time import perf_counter

import pytest

from bench.latency import member
from bench.latency.__main__ import lines, main
from bench.latency.stages import STAGES, Stamps, medians_us

US = 1e-6


def _stamps(**began_us: list[int]) -> Stamps:
    """Spans of 100 us at these times; nothing was noted of the other names."""
    return {name: [(at * US, (at + 100) * US) for at in began_us.get(name, [])] for name in member.NAMES}


def _leader(put_us: int) -> dict[str, list[int]]:
    """The times at which a leader notes its part of a put; what it hears at 600 is of the put before."""
    own = {"received": 50, "checked": 60, "proposed": 80, "sent": 90, "synced": 120}
    later = {"applied": 1_150, "answered": 1_160}
    times = {name: [put_us + at] for name, at in {**own, **later}.items()}
    return {**times, "heard": [put_us + 600, put_us + 1_100]}


PUTS = [(0.0, 1_300 * US), (2_000 * US, 3_300 * US)]
LEADER = _stamps(**{name: [*_leader(0)[name], *_leader(2_000)[name]] for name in _leader(0)})
FOLLOWER = _stamps(heard=[20, 190, 2_190], synced=[300, 2_300], sent=[410, 2_410])
LATER_FOLLOWER = _stamps(heard=[700, 2_700], synced=[800, 2_800])


def test_the_faster_follower_and_what_follows_its_sync_make_the_stages() -> None:
    found = medians_us(PUTS, LEADER, [LATER_FOLLOWER, FOLLOWER])
    took = {name: figures["p50_us"] for name, figures in found.items()}
    assert took == {
        "on the way to the leader": 50, "received, checked": 10, "waits for the turn": 20, "proposed": 10,
        "leader's log written, wal sync begins": 30, "leader's wal sync": 100,
        "sent: on the way to the follower": 100, "follower's log written": 110, "follower's wal sync": 100,
        "acknowledged: on the way back": 200, "committed, applied": 550, "answered": 10,
        "on the way to the client": 140,
    }  # fmt: skip
    assert found["follower's wal sync"]["begin_us"] == 300
    assert found["follower's wal sync"]["end_us"] == 400


def test_a_put_without_all_its_stamps_does_not_count() -> None:
    found = medians_us([*PUTS, (5.0, 6.0)], LEADER, [FOLLOWER])
    assert found["answered"]["p90_us"] == 10
    with pytest.raises(SystemExit, match="no put"):
        medians_us([(5.0, 6.0)], LEADER, [FOLLOWER])


def test_noted_functions_exist_and_run() -> None:
    assert all(callable(getattr(owner, name)) for owner, name in member.PLACES.values())
    stamps: list[tuple[float, float]] = []
    assert member.stamped(lambda number, more: number + more, stamps)(1, more=2) == 3
    assert len(stamps) == 1
    assert stamps[0][0] <= stamps[0][1]


def test_a_sync_is_noted_from_its_begin_to_its_end() -> None:
    stamps: list[tuple[float, float]] = []
    began_at = perf_counter()
    member.syncs_of(stamps)(0.5)
    ended_at = perf_counter()
    assert [began_at <= ended <= ended_at for _, ended in stamps] == [True]
    assert stamps[0][1] - stamps[0][0] == pytest.approx(0.5)


def test_every_stage_is_told() -> None:
    result = {"puts": 2, "of_puts": 2, "p50_us": 1_300, "p90_us": 1_300, "stages": medians_us(PUTS, LEADER, [FOLLOWER])}
    told = lines("before", result)
    assert told[0] == "before: one put 1,300 us (90 % below 1,300), 2 puts"
    assert len(told) == 1 + len(STAGES)
    assert lines("x", {**result, "of_puts": 20})[0].endswith("the fastest 2 of 20 puts")


def test_results_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="two results"):
        main(["draw", str(tmp_path / "one.json"), str(tmp_path / "other" / "one.json")])


@pytest.mark.long
def test_real_members_note_every_stage(tmp_path: Path) -> None:
    out = tmp_path / "now.json"
    assert main(["measure", "--puts", "20", "--out", str(out)]) == 0
    result = json.loads(out.read_text(encoding="utf-8"))
    assert set(result["stages"]) == {stage.name for stage in STAGES}
    assert all(found["p50_us"] > 0 for found in result["stages"].values())
