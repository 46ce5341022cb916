"""Every fuzz target over its samples, its old findings, and a fixed number of inputs made of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.engine import REGRESSIONS, run
from tests.fuzz.oracle import FuzzFailure, Judge, watched
from tests.fuzz.target import Target
from tests.fuzz.targets import TARGETS

SEED = 1


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_target(name: str) -> None:
    target = TARGETS[name]
    report = run(target, SEED, examples=target.examples)
    assert report.taken >= 1, "no sample is taken: the parser is not reached"
    assert report.outcomes >= 2, "nothing is refused: the oracle sees nothing"


def test_old_findings_belong_to_targets() -> None:
    names = {line.split()[0] for line in REGRESSIONS.read_text().splitlines() if line and not line.startswith("#")}
    assert names <= TARGETS.keys()


def _hang(data: bytes) -> None:
    while True:
        try:
            while True:
                pass
        except Exception:
            continue


@pytest.mark.parametrize(
    ("parse", "what"),
    [
        (lambda data: data[5], "IndexError"),
        (_hang, "of processor time"),
        (lambda data: bytes(64 << 20), "bytes of memory"),
    ],
)
def test_the_oracles_see_what_they_are_for(tmp_path: Path, parse, what: str) -> None:
    target = Target("bad", lambda directory: parse, lambda: [b""], (ValueError,), cpu_max_s=0.05)
    with watched(), pytest.raises(FuzzFailure, match=what):
        Judge(target, tmp_path).judge(b"abc")


def test_retained_input_is_found(tmp_path: Path) -> None:
    kept: list[bytes] = []
    target = Target("keeps", lambda directory: lambda data: kept.append(bytes(1 << 16)), lambda: [b""])
    with watched():
        judge = Judge(target, tmp_path)
        judge.check_growth()
        for _ in range(100):
            judge.judge(b"")
        with pytest.raises(FuzzFailure, match="are left of"):
            judge.check_growth()
