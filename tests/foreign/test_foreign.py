"""Other people's clients on raftkv and on real etcd 3.5.1: the same scenarios, the same observations.

Every script plays on etcd and on three members of raftkv; one that restarts a member, on a single one too. All must
tell the same steps, and these must be the ones in `testdata/<client>-<area>.txt`, which come from real etcd (`pytest
--rewrite` writes them anew): a script that plays nothing cannot pass.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from raftkv import connect
from raftkv.errors import LeaseNotFoundError
from tests.foreign.sessions import CLIENTS, Script, ScriptError, Steps, play
from tests.procs import ETCD_FAST, RAFTKV, Cluster

TESTDATA = Path(__file__).resolve().parent / "testdata"

AREAS = {
    "etcd3": ("kv", "watch", "lease", "lock", "admin", "restart"),
    "aetcd": ("kv", "watch", "lease", "lock", "admin", "restart"),
    "etcd_client": ("kv", "watch", "lease", "lock"),
    "etcd3gw": ("kv", "watch", "lease", "lock", "groups"),
    "node": ("kv", "watch", "lease", "lock", "elect"),
    "etcdctl-3.4": ("watch", "lease", "lock", "elect"),
    "etcdctl-3.5": ("watch", "lease", "lock", "elect"),
}
"""What each client can do; what etcdctl does with keys is compared in `tests/compat`."""

SEVERAL_ENDPOINTS = ("etcd_client", "node", "etcdctl-3.4", "etcdctl-3.5")
"""The clients that go on at another member when theirs dies."""


SCRIPTS = [Script(name, area) for name in AREAS for area in AREAS[name]]
KILLING = [Script(name, "kill") for name in SEVERAL_ENDPOINTS]
USERS = [Script(name, "users") for name in AREAS if name != "etcd3gw"]
"""etcd3gw knows no users. Played by ``test_foreign_users``, on clusters that ask for users."""


@pytest.fixture(scope="module")
def etcd_one() -> Iterator[Cluster]:
    with Cluster(ETCD_FAST) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def raftkv_one() -> Iterator[Cluster]:
    with Cluster(RAFTKV) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def etcd_three() -> Iterator[Cluster]:
    with Cluster(ETCD_FAST, size=3) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def raftkv_three() -> Iterator[Cluster]:
    with Cluster(RAFTKV, size=3) as cluster:
        yield cluster


def write_down(steps_of: dict[str, Steps]) -> str:
    """Return steps as the text of a golden file: a heading a scenario, a line a step."""
    parts = []
    for scenario, steps in steps_of.items():
        lines = [json.dumps(step, ensure_ascii=False, sort_keys=True) for step in steps]
        parts.append("\n".join([f"== {scenario}", *lines, ""]))
    return "\n".join(parts)


def _end_leases(cluster: Cluster) -> None:
    """End what an earlier program has left: its keys would go amid this one, whose revisions would count that."""
    with connect(cluster.endpoints) as client:
        for lease_id in client.leases():
            with suppress(LeaseNotFoundError):
                client.revoke(lease_id)


def _report_of(script: Script, cluster: Cluster) -> str:
    _end_leases(cluster)
    try:
        return write_down(play(script, cluster))
    except Exception as error:
        error.add_note(cluster.logs())
        raise


def _check(script: Script, clusters: list[Cluster], rewrite: bool) -> None:
    golden = TESTDATA / f"{script.name}.txt"
    etcd, *raftkv = _reports_of_all(script, clusters)
    if rewrite:
        assert "RAISED" not in etcd, etcd
        golden.write_text(etcd, encoding="utf-8")
    expected = golden.read_text(encoding="utf-8")
    if etcd != expected:
        # The program was too slow for its own timing, or met one of etcd's own races: then nothing was compared.
        etcd, *raftkv = _reports_of_all(script, clusters)
    assert etcd == expected, "real etcd tells something else than expected, twice"
    for steps_of, cluster in zip(raftkv, clusters[1:], strict=True):
        assert steps_of == expected, f"raftkv differs from etcd\n{cluster.logs()}"


def _reports_of_all(script: Script, clusters: list[Cluster]) -> list[str]:
    with ThreadPoolExecutor(max_workers=len(clusters)) as pool:
        return list(pool.map(lambda cluster: _report_of(script, cluster), clusters))


@pytest.mark.long
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.name)
def test_a_foreign_client_sees_no_difference(script, etcd_one, raftkv_three, request, rewrite):
    alone = [request.getfixturevalue("raftkv_one")] if script.area == "restart" else []
    _check(script, [etcd_one, raftkv_three, *alone], rewrite)


@pytest.mark.long
@pytest.mark.parametrize("script", KILLING, ids=lambda s: s.name)
def test_a_foreign_client_outlives_the_death_of_every_member_in_turn(script, etcd_three, raftkv_three, rewrite):
    _check(script, [etcd_three, raftkv_three], rewrite)


def test_every_script_is_played_and_nothing_else_is_expected() -> None:
    files = {path for path in CLIENTS.glob("*/*") if path.suffix in (".py", ".js") and path.parent.name != "shared"}
    played = {script.path for script in SCRIPTS + KILLING + USERS}
    assert played == {path for path in files if path.stem != "common"}
    assert {path.stem for path in TESTDATA.iterdir()} == {script.name for script in SCRIPTS + KILLING + USERS}


@pytest.mark.parametrize("script", SCRIPTS + KILLING + USERS, ids=lambda s: s.name)
def test_expectations_cover_every_scenario(script: Script) -> None:
    expected = (TESTDATA / f"{script.name}.txt").read_text(encoding="utf-8")
    scenarios = {part.splitlines()[0]: part.splitlines()[1:] for part in expected.split("== ") if part}
    played = script.path.read_text(encoding="utf-8").rpartition("run(")[2].partition(")")[0].replace("\n", " ")
    assert list(scenarios) == [name for name in played.replace(" ", "").split(",") if name and "=" not in name]
    assert all(scenarios.values())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("raise SystemExit('no such module')", "no such module"),
        ("print('{\"end\": true}'); raise SystemExit(3)", "ended with 3"),
        ('print(\'{"scenario": "one", "step": [1]}\')', "ended with 0"),
        ('print(\'{"order": "explode", "member": 0}\', flush=True)', "unknown order 'explode'"),
    ],
    ids=["dies", "fails after its end", "stops early", "orders what nobody can do"],
)
def test_a_script_that_goes_wrong_is_an_error(etcd_one: Cluster, text: str, why: str) -> None:
    class Broken(Script):
        def command(self) -> list[str]:
            return [sys.executable, "-c", text]

    with pytest.raises(ScriptError, match=why):
        play(Broken("broken", "script"), etcd_one)
