"""``raftkvctl checkpoint list|show|latest|best|runs|lineage|watch`` on checkpoints that the test has saved."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import raftkv
from raftkv.checkpoint import Reference
from raftkv.checkpoint.keys import RegistryKeys
from raftkv.cli.checkpoints import checkpoints_table
from raftkv.cli.table import clock
from tests.cli.checkpoints.registered import ctl, save, text_of
from tests.cli.programs import Running, raftkvctl
from tests.cli.runner import run_ctl


def strict(text: str) -> object:
    """Read JSON as strict readers do: without NaN and Infinity."""

    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is no JSON")

    return json.loads(text, parse_constant=refuse)


def cells(line: str) -> list[str]:
    return re.split(r" {2,}", line)


def test_checkpoints_are_listed(raftkv_cluster, raftkv_client, tmp_path: Path) -> None:
    first = save(raftkv_client, tmp_path, 100, loss=0.5)
    second = save(raftkv_client, tmp_path, 200, loss=0.25, accuracy=0.5)
    save(raftkv_client, tmp_path, 150, kind="safetensors")
    header, *lines = text_of(ctl(raftkv_cluster, "list", "job")).splitlines()
    assert cells(header) == [
        "step", "kind", "generation", "ranks", "files", "size", "committed", "took", "metrics", "kept as"
    ]  # fmt: skip
    assert [cells(line)[:6] for line in lines] == [
        ["100", "dcp", "1", "2", "2", "32 B"],
        ["200", "dcp", "1", "2", "2", "32 B"],
        ["150", "safetensors", "1", "2", "2", "32 B"],
    ]
    assert cells(lines[0])[-1] == "loss 0.5"
    assert cells(lines[1])[-2:] == ["accuracy 0.5, loss 0.25", "latest"]
    assert cells(lines[1])[6] == clock(second.time)
    assert [cells(line)[0] for line in text_of(ctl(raftkv_cluster, "list", "job", "--limit=1")).splitlines()[1:]] == [
        "200", "150"
    ]  # fmt: skip
    (found, _) = strict(text_of(ctl(raftkv_cluster, "list", "job", "--json", "--kind", "dcp")))
    assert (found["step"], found["uri"], found["metrics"], found["kept_as"]) == (100, first.uri, {"loss": 0.5}, [])


def test_a_long_list_is_laid_out_by_looking_at_each_once() -> None:
    """For the newest of its kind each of 9,500 was compared with each other: 29 s."""
    looks = 0

    class One(SimpleNamespace):
        """A checkpoint that counts who looks at its step."""

        def __getattribute__(self, name: str) -> object:
            nonlocal looks
            looks += name == "step"
            return super().__getattribute__(name)

    zeros = dict.fromkeys(("generation", "world_size", "file_count", "size_bytes", "time", "duration_s"), 0)
    listed = [One(step=step, kind="dcp", metrics={}, **zeros) for step in range(100)]
    assert [row[-1] for row in checkpoints_table(listed, {}).rows] == [*[""] * 99, "latest"]
    assert looks < 1000


def test_one_is_shown_whichever_way_it_is_named(raftkv_cluster, raftkv_client, tmp_path: Path) -> None:
    first = save(raftkv_client, tmp_path, 100, loss=0.5, accuracy=0.125)
    save(raftkv_client, tmp_path, 200, loss=0.75, accuracy=0.25)
    for word, step in (("latest", 200), ("100", 100), ("min:loss", 100), ("max:loss", 200), ("min:accuracy", 100)):
        assert strict(text_of(ctl(raftkv_cluster, "show", "job", word, "--json")))["step"] == step
    lines = text_of(ctl(raftkv_cluster, "show", "job", "100", "--files")).splitlines()
    assert lines[0] == "run job, step 100"
    assert f"  {'uri':14}{first.uri}" in lines
    assert f"  {'files':14}2, 32 B (32 bytes)" in lines
    assert f"  {'manifest':14}{first.manifest}" in lines
    assert [cells(line)[:3] for line in lines[-2:]] == [["0", "0.bin", "16 B"], ["1", "1.bin", "16 B"]]
    files = strict(text_of(ctl(raftkv_cluster, "show", "job", "100", "--files", "--json")))["files"]
    assert [(file["rank"], file["name"], file["size_bytes"]) for file in files] == [(0, "0.bin", 16), (1, "1.bin", 16)]


def test_latest_and_best_print_paths_for_scripts(raftkv_cluster, raftkv_client, tmp_path: Path) -> None:
    first = save(raftkv_client, tmp_path, 100, loss=0.5)
    second = save(raftkv_client, tmp_path, 200, loss=0.75)
    other = save(raftkv_client, tmp_path, 7, run_id="teams/b", loss=0.25)
    assert text_of(ctl(raftkv_cluster, "latest", "job", "--uri")) == f"{second.uri}\n"
    assert strict(text_of(ctl(raftkv_cluster, "latest", "job", "--json")))["step"] == 200
    assert text_of(ctl(raftkv_cluster, "best", "job", "loss", "--uri")) == f"{first.uri}\n"
    assert text_of(ctl(raftkv_cluster, "best", "job", "loss", "--mode", "max", "--uri")) == f"{second.uri}\n"
    every = text_of(ctl(raftkv_cluster, "best", "loss", "--all-runs", "--count", "5", "--uri"))
    assert every == f"{other.uri}\n{first.uri}\n"
    rows = text_of(ctl(raftkv_cluster, "best", "job", "loss", "--count", "2")).splitlines()
    assert [cells(row)[:4] for row in rows[1:]] == [["0.5", "job", "100", "dcp"], ["0.75", "job", "200", "dcp"]]


def test_runs_are_listed_with_their_latest(raftkv_cluster, raftkv_client, tmp_path: Path) -> None:
    assert text_of(ctl(raftkv_cluster, "runs")) == (
        "run  kind  latest  committed  checkpoints  size  metrics (from to)\n"
    )
    save(raftkv_client, tmp_path, 100, loss=0.5)
    latest = save(raftkv_client, tmp_path, 200, loss=0.75)
    save(raftkv_client, tmp_path, 7, run_id="teams/b")
    lines = text_of(ctl(raftkv_cluster, "runs")).splitlines()
    assert cells(lines[1]) == ["job", "dcp", "200", clock(latest.time), "2", "64 B", "loss 0.5 0.75"]
    assert cells(lines[2])[:3] == ["teams/b", "dcp", "7"]
    assert [one["run_id"] for one in strict(text_of(ctl(raftkv_cluster, "runs", "--json")))] == ["job", "teams/b"]


def test_lineage_across_runs(raftkv_cluster, raftkv_client, tmp_path: Path) -> None:
    save(raftkv_client, tmp_path, 100)
    save(raftkv_client, tmp_path, 10, run_id="tuned", parent=Reference("job", "dcp", 100))
    lines = text_of(ctl(raftkv_cluster, "lineage", "tuned")).splitlines()
    assert [cells(line)[:3] for line in lines[1:]] == [["tuned", "10", "dcp"], ["job", "100", "dcp"]]
    found = strict(text_of(ctl(raftkv_cluster, "lineage", "tuned", "10", "--json")))
    assert ([one["run_id"] for one in found["checkpoints"]], found["ends_at"]) == (["tuned", "job"], None)
    kept = strict(text_of(ctl(raftkv_cluster, "show", "job", "--json")))["kept_as"]
    assert kept == ["parent of tuned@dcp@10"]


def test_numbers_that_json_does_not_have(raftkv_cluster, raftkv_client, tmp_path: Path) -> None:
    save(raftkv_client, tmp_path, 100, loss=float("nan"), norm=float("inf"))
    found = strict(text_of(ctl(raftkv_cluster, "show", "job", "--json")))
    assert found["metrics"] == {"loss": "NaN", "norm": "Infinity"}
    assert strict(text_of(ctl(raftkv_cluster, "runs", "--json")))[0]["best"]["norm"]["max_value"] == "Infinity"


def test_texts_of_users_do_nothing_to_a_terminal(raftkv_cluster, raftkv_client, tmp_path: Path) -> None:
    registry = raftkv.checkpoint.Registry(raftkv_client, "job", uri=str(tmp_path))
    attempt = registry.begin(registry.claim(), 1, metadata={"note": "café \x1b[2J\n"})
    attempt.prepare(0, [])
    planted = replace(attempt.commit(), root="\x1b[2J", uri=f"{tmp_path}/\x1b[2J")
    raftkv_client.put(RegistryKeys("job").record(planted.kind, 1), planted.encode())
    shown, verified = text_of(ctl(raftkv_cluster, "show", "job")), ctl(raftkv_cluster, "verify", "job")
    assert "note=café \\x1b[2J\\n\n" in shown
    assert (verified.code, "\x1b" in shown + verified.errors) == (1, False)


def test_commits_are_watched_and_gone_on_with(raftkv_cluster, raftkv_client, tmp_path: Path) -> None:
    first = save(raftkv_client, tmp_path, 100, loss=0.5)
    second = save(raftkv_client, tmp_path, 200)
    ran = ctl(raftkv_cluster, "watch", "job", "--from-revision=1", "--count=1", "--json")
    assert (ran.code, ran.errors) == (0, "")
    told = strict(ran.output.decode())
    assert (told["checkpoint"]["step"], told["next_revision"]) == (100, told["revision"] + 1)
    again = ctl(raftkv_cluster, "watch", "job", "--from-revision", str(told["next_revision"]), "--count=1")
    assert again.code == 0
    line = rf"\S+  step 200 \(dcp\): 2 files, 32 B; revision (\d+); {re.escape(second.uri)}\n"
    found = re.fullmatch(line, again.output.decode())
    assert found
    assert again.errors == f"raftkvctl: to continue: --from-revision {int(found[1]) + 1}\n"
    both = ctl(raftkv_cluster, "watch", "job", "--from-revision=1", "--count=2", "--uri")
    assert both.output.decode() == f"{first.uri}\n{second.uri}\n"


def test_a_path_from_a_record_is_one_line_and_controls_no_terminal(raftkv_cluster, raftkv_client, tmp_path: Path):
    forged = replace(save(raftkv_client, tmp_path, 100, loss=0.5), uri="/a\n/b\x1b[2J")
    raftkv_client.put(RegistryKeys("job").record("dcp", 100), forged.encode())
    for words in (("latest", "job"), ("best", "job", "loss")):
        assert ctl(raftkv_cluster, *words, "--uri").output == b"/a\\n/b\\x1b[2J\n"


@pytest.mark.long
def test_a_watch_that_is_interrupted_says_where_to_go_on(raftkv_cluster, raftkv_client, tmp_path: Path) -> None:
    save(raftkv_client, tmp_path, 100)
    with Running(raftkvctl(raftkv_cluster.endpoints[0], "checkpoint", "watch", "job", "--from-revision=1")) as program:
        program.wait_printed(b"step 100 (dcp): 2 files, 32 B; revision ")
        save(raftkv_client, tmp_path, 200)
        program.wait_printed(b"step 200 (dcp)")
        done = program.stop()
    assert done.code == 0
    (last,) = re.findall(r"step 200 .*; revision (\d+);", done.output.decode())
    assert done.errors == f"raftkvctl: to continue: --from-revision {int(last) + 1}"


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["list"], 128, "checkpoint list needs RUN"),
        (["show", "a", "b", "c"], 128, "checkpoint show needs RUN [WHICH]"),
        (["best", "loss", "--all-runs", "x"], 128, "checkpoint best needs METRIC"),
        (["best", "job", "loss", "--count=0"], 1, "--count must be a whole number, 1 or more"),
        (["runs", "x"], 128, "checkpoint runs needs no arguments"),
        (["show", "a", "newest"], 128, "'newest' is not a checkpoint: write latest, a step, tag:NAME, min:METRIC or"),
        (["show", "a", "9" * 5000], 128, "'999"),
        (["show", "a/../b"], 128, "run id '..' cannot be used: 1 to 200 bytes, without slashes"),
        (["show", "a", "9999999999999"], 128, "step 9999999999999 cannot be used"),
        (["list", "a", "--kind", "zip"], 128, "'zip' is not a kind of checkpoint; the kinds are dcp, "),
        (["list", "a", "-w", "protobuf"], 4, "protobuf not supported as output format"),
        (["list", "none"], 1, "run 'none' has no checkpoints; `raftkvctl checkpoint runs` shows the runs"),
        (["latest", "none"], 1, "run 'none' has no checkpoint"),
        (["show", "none", "7"], 1, "run 'none' has no checkpoint of step 7"),
        (["show", "none", "tag:x"], 1, "run 'none' has no checkpoint with the tag 'x'"),
        (["best", "none", "loss"], 1, "run 'none' has no checkpoint with the metric 'loss'"),
        (["best", "loss", "--all-runs"], 1, "no run has a checkpoint with the metric 'loss'"),
        (["watch", "job", "--from-revision=-1"], 1, "--from-revision must be a whole number, 0 or more"),
    ],
)
def test_words_that_cannot_be(raftkv_cluster, words: list[str], code: int, text: str) -> None:
    ran = ctl(raftkv_cluster, *words)
    assert (ran.code, ran.output) == (code, b"")
    assert ran.errors.startswith(f"Error: {text}")
    assert ran.errors.count("\n") == 1


@pytest.mark.parametrize("words", [["list", "job"], ["watch", "job"], ["runs"]])
def test_unreachable_server(words: list[str]) -> None:
    ran = run_ctl(["--endpoints", "127.0.0.1:1", "--command-timeout", "200ms", "checkpoint", *words])
    assert (ran.code, ran.output) == (1, b"")
    assert ran.errors.startswith("Error: no answer within 0.2 s from 127.0.0.1:1: ")


def test_a_foreign_record_is_one_line(raftkv_cluster, raftkv_client) -> None:
    raftkv_client.put("/raftkv/checkpoint/latest/job/dcp", b"[]")
    ran = ctl(raftkv_cluster, "list", "job")
    assert (ran.code, ran.errors) == (
        1,
        "Error: not a latest record: /raftkv/checkpoint/latest/job/dcp: list instead of an object\n",
    )


def test_bytes_that_are_gone_are_one_line(raftkv_cluster, raftkv_client, tmp_path: Path) -> None:
    saved = save(raftkv_client, tmp_path, 100)
    manifest = Path(saved.uri, "raftkv-manifest.jsonl")
    manifest.write_bytes(b"{}\n")
    damaged = ctl(raftkv_cluster, "show", "job", "--files")
    assert (damaged.code, damaged.output) == (1, b"")
    assert damaged.errors.startswith(f"Error: {saved.uri}: raftkv-manifest.jsonl is not the one that was committed; ")
    manifest.unlink()
    gone = ctl(raftkv_cluster, "show", "job", "--files")
    assert (gone.code, gone.errors.count("\n")) == (1, 1)
    assert gone.errors.startswith(f"Error: cannot read {saved.uri}/raftkv-manifest.jsonl: ")
