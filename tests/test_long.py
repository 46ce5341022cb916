"""Selection of tests: all but the long ones, only the long ones, both, or tests given by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import installed

ROOT = Path(__file__).resolve().parents[1]
FAULTS = "tests/storage/test_system_faults.py"
NAMED = f"{FAULTS}::test_each_failure_is_typed_or_passed_over_and_loses_nothing"


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "taken"),
    [
        ([FAULTS], {"ENOSPC"}),
        ([FAULTS, "-m", "long"], {"EIO", "EROFS", "EDQUOT", "EMFILE"}),
        ([NAMED], {"EIO", "ENOSPC", "EROFS", "EDQUOT", "EMFILE"}),
    ],
    ids=["make test", "make test-all", "named"],
)
def test_marked_tests_are_selected(words: list[str], taken: set[str]) -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(FAULTS)]
    assert {line.partition("[")[2].removesuffix("]") for line in lines} == taken, done.stdout + done.stderr


@pytest.mark.parametrize(("ci", "end"), [("", pytest.skip.Exception), ("1", pytest.fail.Exception)])
def test_a_missing_program_skips_a_test_but_fails_it_in_ci(monkeypatch, ci, end):
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(end, match=r"^promtool is missing: apt-get install prometheus$"):
        installed.program("promtool")


def test_make_runs_every_test_once() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    runs = [line.strip() for line in text.splitlines() if "-m pytest" in line]
    rest = ("", ' -m "long and interpreted"', " -m long")
    whole = [line for line in runs if not line.endswith("$(QUICK)")]
    assert whole == ["$(BIN)/python -m pytest -n $(JOBS) --dist worksteal" + more for more in rest]
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert [line for line in script.splitlines() if line.startswith("make ")] == [
        "make verify",
        "make test",
        "make test-interpreted",
        "make native",
        "make test-all",
    ]
