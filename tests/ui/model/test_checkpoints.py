"""Checkpoints in the dashboard are those that `raftkvctl checkpoint list|runs|lineage|show` print."""

from __future__ import annotations

import math
from pathlib import Path
from urllib.parse import quote

import pytest

import raftkv
from raftkv.checkpoint import FileRecord, digest
from raftkv.checkpoint.keys import LATEST, RegistryKeys
from raftkv.cli import checkpoints as frame
from tests.cli.checkpoints.registered import ctl, save, text_of
from tests.cli.runner import Ran
from tests.ui.model.runner import Model, kv

RUN = "jobs/bert (large)"


def stored(client: raftkv.Client, *prefixes: str) -> list[dict[str, str]]:
    return [
        kv(one.key.decode(), one.value, create=one.create_revision, mod=one.mod_revision, lease=one.lease)
        for prefix in prefixes
        for one in client.range(prefix, prefix=True)
    ]


def printed(ran: Ran) -> list[str]:
    return [" ".join(line.split()) for line in text_of(ran).splitlines()[1:]]


def shown(rows: list[list[str]]) -> list[str]:
    return [" ".join(" ".join(row).split()) for row in rows]


@pytest.fixture
def registry(raftkv_client, tmp_path: Path) -> raftkv.checkpoint.Registry:
    """Three checkpoints of two kinds: one tagged, one pinned, one with a child in another run; and an odd key."""
    first = save(raftkv_client, tmp_path, 100, run_id=RUN, loss=0.5)
    second = save(raftkv_client, tmp_path, 200, run_id=RUN, loss=math.nan, accuracy=1e-7, parent=first.reference)
    save(raftkv_client, tmp_path, 150, run_id=RUN, kind="orbax")
    save(raftkv_client, tmp_path, 7, run_id="tuned", parent=second.reference)
    registry = raftkv.checkpoint.Registry(raftkv_client, RUN, uri=str(tmp_path / "bert"))
    registry.tag("release-1", first)
    registry.pin_for(second, "evaluator@east", 0)
    raftkv_client.put(f"{RegistryKeys(RUN).records}dcp/000000000999", b"not a record")
    return registry


def test_the_list_says_what_the_command_line_says(registry, raftkv_cluster, raftkv_client, model: Model) -> None:
    keys = RegistryKeys(RUN)
    found = model.run(
        "checkpoints", run=RUN, kvs=stored(raftkv_client, keys.base), latest=stored(raftkv_client, keys.latest_all)
    )
    assert shown(found["rows"]) == printed(ctl(raftkv_cluster, "list", RUN))
    assert found["rows"][0][-1] == "tag release-1"
    assert found["rows"][1][-1] == "latest, parent of tuned@dcp@7, pinned by evaluator@east"
    assert found["tags"] == [{"name": "release-1", "on": {"run_id": RUN, "kind": "dcp", "step": 100}}]
    assert found["children"][1] == [{"run_id": "tuned", "kind": "dcp", "step": 7}]
    for place, step in ((0, 100), (1, 200), (2, 150)):
        lines = [" ".join(pair) for pair in found["details"][place]]
        assert [" ".join(line.split()) for line in lines] == printed(ctl(raftkv_cluster, "show", RUN, str(step)))


def test_the_runs_are_those_of_the_command_line(registry, raftkv_cluster, raftkv_client, model: Model) -> None:
    found = model.run("summaries", kvs=stored(raftkv_client, LATEST))
    assert shown(found) == printed(ctl(raftkv_cluster, "runs"))
    assert {row[0] for row in found} == {RUN, "tuned"}


def test_the_lineage_is_that_of_the_command_line(registry, raftkv_cluster, raftkv_client, model: Model) -> None:
    kvs = [*stored(raftkv_client, RegistryKeys("tuned").records), *stored(raftkv_client, RegistryKeys(RUN).records)]
    rows = [
        row for run in ("tuned", RUN) for row in reversed(model.run("checkpoints", run=run, kvs=kvs)["lineage"])
        if row[2] == "dcp"
    ]  # fmt: skip
    assert shown(rows) == printed(ctl(raftkv_cluster, "lineage", "tuned"))


def test_attempts_and_deletions_under_way_are_shown(registry, raftkv_client, tmp_path: Path, model: Model) -> None:
    claim = registry.claim("node-1")
    old = registry.begin(claim, 300, world_size=3)
    old.prepare(1, [FileRecord("1.bin", 1, digest.of_bytes(b"x"))])
    keys = RegistryKeys(RUN)

    def attempts() -> list:
        return model.run("checkpoints", run=RUN, kvs=stored(raftkv_client, keys.base))["attempts"]

    (found,) = attempts()
    assert (found["step"], found["prepared"], found["worldSize"], found["isStale"]) == (300, 1, 3, False)
    raftkv_client.put(keys.fence, b'{"generation":99,"source":"other"}')
    assert [one["isStale"] for one in attempts()] == [True]
    attempt = next(one.key.decode() for one in raftkv_client.range(keys.attempts, prefix=True)).split("/")[-2]
    raftkv_client.put(f"{keys.deletings}dcp/{attempt}", b'{"uri":"memory://x","reason":"too old","time":1.5}')
    found = model.run("checkpoints", run=RUN, kvs=stored(raftkv_client, keys.base))["deletions"]
    assert found == [{"step": 300, "kind": "dcp", "uri": "memory://x", "reason": "too old", "time": 1.5}]


def test_numbers_and_names_look_as_in_the_command_line(model: Model) -> None:
    sizes = [0, 999, 1023, 1024, 1536, 5 << 40, 2**53]
    spans = [0.25, 59.5, 60, 75, 3599.75, 7500]
    numbers = [0.0, 0.5, 1e-7, 123456.7, 1234567.0, 1e20, -0.00012345678, 100000.0, 2 / 3]
    names = ["a/b c", "bert!'()*~", "café", "100%", "\U0001f600"]
    found = model.run("words", sizes=sizes, spans=spans, numbers=numbers, names=names)
    assert found["sizes"] == [frame.size(one) for one in sizes]
    assert found["spans"] == [frame.span(one) for one in spans]
    assert found["numbers"] == [f"{one:.6g}" for one in numbers]
    assert found["quoted"] == [quote(one, safe="") for one in names]


def test_long_lineages_are_folded_and_drawn_by_run(model: Model) -> None:
    old = [{"run_id": "base", "kind": "dcp", "step": step} for step in range(40, 0, -1)]
    chain = [{"run_id": "tuned", "kind": "dcp", "step": 7}, *old]
    child = {"run_id": "rl", "kind": "dcp", "step": 1}
    found = model.run("lineage", chain=chain, children=[child], lost={"run_id": "seed", "kind": "dcp", "step": 5})
    assert [(one["run_id"], one["step"], one["role"], one["more"]) for one in found["boxes"]] == [
        ("seed", 5, "lost", 0), ("base", 1, "ancestor", 0), ("base", 2, "more", 38), ("base", 40, "ancestor", 0),
        ("tuned", 7, "chosen", 0), ("rl", 1, "child", 0),
    ]  # fmt: skip
    assert found["arrows"] == [[place, place + 1] for place in range(5)]
    assert (found["runs"], found["columns"]) == (["seed", "base", "tuned", "rl"], 6)
