"""Failpoints: no cost while unarmed, exact when armed, and every point in the code is declared."""

from __future__ import annotations

import ast
import errno
import os
import subprocess
import sys
import threading
import time
import timeit
from collections.abc import Iterator
from pathlib import Path

import pytest

from raftkv.errors import ConfigError
from raftkv.storage import failpoints
from raftkv.storage.failpoints import PANIC_EXIT_STATUS, SITES, FailpointPanic, arm, arm_from, disarm, failpoint, hits

ROOT = Path(__file__).parents[2]
SITE = "walBeforeSync"


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    failpoints.disarm_all()
    yield
    failpoints.disarm_all()


def test_nothing_happens_unless_armed() -> None:
    failpoint(SITE)
    arm("walAfterSync", "raise")
    failpoint(SITE)
    assert hits(SITE) == 0


def test_raise_error_and_count_act_where_they_are_armed() -> None:
    arm(SITE, "raise")
    with pytest.raises(FailpointPanic, match=SITE):
        failpoint(SITE)
    arm(SITE, "error")
    with pytest.raises(OSError, match=f"failpoint {SITE}") as caught:
        failpoint(SITE)
    assert caught.value.errno == errno.EIO
    arm(SITE, "error(ENOSPC)")
    with pytest.raises(OSError, match="No space left") as caught:
        failpoint(SITE)
    assert caught.value.errno == errno.ENOSPC
    arm(SITE, "count")
    for _hit in range(3):
        failpoint(SITE)
    assert hits(SITE) == 3
    disarm(SITE)
    failpoint(SITE)
    assert hits(SITE) == 0


def test_a_point_calls_a_function_of_a_simulation() -> None:
    called: list[str] = []
    failpoints.arm_call(SITE, called.append)
    failpoint(SITE)
    failpoint("walAfterSync")
    assert called == [SITE]
    disarm(SITE)
    failpoint(SITE)
    assert called == [SITE]
    with pytest.raises(ConfigError, match="unknown failpoint"):
        failpoints.arm_call("nowhere", called.append)


def test_a_panic_passes_every_handler_of_ordinary_errors() -> None:
    assert not issubclass(FailpointPanic, Exception)


def acted(spec: str, count: int, seed: int | None = None) -> list[bool]:
    arm(SITE, spec, seed)
    results = []
    for _hit in range(count):
        try:
            failpoint(SITE)
            results.append(False)
        except OSError:
            results.append(True)
    return results


def test_after_n_lets_n_hits_pass() -> None:
    assert acted("after-2 error", 5) == [False, False, True, True, True]


def test_one_in_n_is_about_one_in_n_and_fixed_by_its_seed() -> None:
    first = acted("1-in-4 error", 400, seed=1)
    assert 60 < sum(first) < 140
    assert acted("1-in-4 error", 400, seed=1) == first
    assert acted("1-in-4 error", 400, seed=2) != first
    assert all(acted("1-in-1 error", 10))


def test_sleep_delays_the_thread_that_hits_it() -> None:
    arm(SITE, "sleep(50)")
    done = threading.Event()
    thread = threading.Thread(target=lambda: (failpoint(SITE), done.set()))
    begin = time.monotonic()
    thread.start()
    assert done.wait(90)
    thread.join()
    assert time.monotonic() - begin >= 0.05


@pytest.mark.parametrize(
    ("name", "spec", "reason"),
    [
        ("walBeforeSink", "panic", "unknown failpoint 'walBeforeSink'"),
        (SITE, "explode", "cannot read the action 'explode'"),
        (SITE, "sleep", "sleep needs milliseconds"),
        (SITE, "sleep(fast)", "sleep needs milliseconds"),
        (SITE, "error(EWHAT)", "'EWHAT' is not the name of an errno"),
        (SITE, "error(errorcode)", "not the name of an errno"),
        (SITE, "panic(1)", "panic takes no argument"),
        (SITE, "1-in-0 panic", "never acts"),
        (SITE, "1-in-x panic", "cannot read"),
        (SITE, "", "cannot read"),
    ],
)
def test_invalid_failpoint_is_refused_in_one_line(name: str, spec: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        arm(name, spec)
    assert "\n" not in str(caught.value)
    failpoint(SITE)


def test_the_environment_arms_a_list() -> None:
    arm_from({"RAFTKV_FAILPOINTS": f" {SITE} = after-1 error(EROFS) ; walAfterSync=count; ", "OTHER": "x"})
    failpoint(SITE)
    with pytest.raises(OSError, match="Read-only"):
        failpoint(SITE)
    failpoint("walAfterSync")
    assert hits("walAfterSync") == 1


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"RAFTKV_FAILPOINTS": "nonsense"}, "RAFTKV_FAILPOINTS: 'nonsense' is not name=action"),
        ({"RAFTKV_FAILPOINTS_SEED": "x"}, "'x' is not a number"),
    ],
)
def test_a_bad_environment_is_refused_in_one_line(environment: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        arm_from(environment)


def run_with(value: str) -> subprocess.CompletedProcess[str]:
    code = f"from raftkv.storage.failpoints import failpoint\nfailpoint({SITE!r})\nprint('went on')"
    environment = {**os.environ, "RAFTKV_FAILPOINTS": value}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_panic_leaves_the_process_at_once() -> None:
    done = run_with(f"{SITE}=panic")
    assert (done.returncode, done.stdout, done.stderr) == (PANIC_EXIT_STATUS, "", f"failpoint {SITE}: panic\n")


def test_a_process_with_a_bad_list_ends_with_one_line() -> None:
    done = run_with("walBeforeSink=panic")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "raftkv: unknown failpoint 'walBeforeSink'\n")


def points_in(source: str, path: str) -> Iterator[tuple[str | None, str]]:
    """Every call of ``failpoint``: its name (None if it is not a literal) and where it is."""
    # Most files have none, and need not be parsed.
    for node in ast.walk(ast.parse(source, path)) if "failpoint" in source else ():
        if isinstance(node, ast.Call) and "failpoint" in {
            getattr(node.func, "id", None),
            getattr(node.func, "attr", None),
        }:
            literal = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
            yield literal if isinstance(literal, str) else None, f"{path}:{node.lineno}"


def undeclared(source: str, path: str) -> list[str]:
    return [f"{where}: {name}" for name, where in points_in(source, path) if name not in SITES]


def test_the_walk_finds_undeclared_points() -> None:
    source = "failpoint('walBeforeSync')\nfailpoints.failpoint('oops')\nfailpoint(name)\nother('walx')"
    assert undeclared(source, "x.py") == ["x.py:2: oops", "x.py:3: None"]


def test_every_point_in_the_code_is_declared() -> None:
    paths = [*(ROOT / "raftkv").rglob("*.py"), *(ROOT / "storage").rglob("*.py")]
    assert [line for path in paths for line in undeclared(path.read_text(), str(path))] == []


def test_every_declared_point_is_in_the_code() -> None:
    paths = [path for folder in ("raftkv", "storage") for path in sorted((ROOT / folder).rglob("*.py"))]
    used = [name for path in paths for name, _where in points_in(path.read_text(), str(path))]
    assert sorted(set(map(str, used))) == sorted(SITES)
    of_the_log = [name for name in map(str, used) if name.startswith("wal")]
    assert len(of_the_log) == len(set(of_the_log))


def test_a_point_that_is_not_armed_costs_next_to_nothing() -> None:
    """A generous bound, for slow machines: the point of the test is that no dictionary or string work creeps in."""
    seconds = min(timeit.repeat(lambda: failpoint(SITE), number=20_000, repeat=10))
    assert seconds / 20_000 < 1e-6
