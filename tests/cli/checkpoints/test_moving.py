"""``raftkvctl checkpoint export|import|copy`` between runs of one cluster, and from what other tools have saved."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

import raftkv
from tests.cli.checkpoints.registered import ctl, save, text_of

EMPTY_WEIGHTS = struct.pack("<Q", 2) + b"{}"
"""A safetensors file without tensors."""


def test_an_export_comes_back_in_another_run(raftkv_cluster, raftkv_client, tmp_path: Path) -> None:
    save(raftkv_client, tmp_path, 100, loss=0.5)
    out = tmp_path / "out"
    told = text_of(ctl(raftkv_cluster, "export", "job", "latest", str(out)))
    assert told == f"step 100 (dcp) of run 'job' was exported to {out}: 2 files, 32 B, all digests match\n"
    assert sorted(path.name for path in out.iterdir()) == [
        "0.bin", "1.bin", "raftkv-checkpoint.json", "raftkv-manifest.jsonl"
    ]  # fmt: skip
    new = tmp_path / "new"
    back = json.loads(text_of(ctl(raftkv_cluster, "import", "other", str(out), "--place", str(new), "--json")))
    assert (back["run_id"], back["step"], back["file_count"]) == ("other", 100, 2)
    assert Path(back["uri"]).parent == new
    shown = json.loads(text_of(ctl(raftkv_cluster, "show", "other", "--json")))
    assert (shown["metrics"], shown["metadata"]) == ({"loss": 0.5}, {"raftkv.origin": "job@100 (dcp)"})
    later = text_of(ctl(raftkv_cluster, "import", "other", str(out), "--step", "200"))  # beside the latest
    assert later == "step 200 (dcp) is in run 'other': 2 files, 32 B, all digests match\n"
    assert len(list(new.glob("step-*"))) == 2


def test_an_import_that_is_refused_ends_no_claim(raftkv_cluster, raftkv_client, tmp_path: Path) -> None:
    """Leave a running job alone if the step is an old one: its next save was refused, and nothing was copied."""
    save(raftkv_client, tmp_path, 100, run_id="base")
    assert ctl(raftkv_cluster, "export", "base", "latest", str(tmp_path / "out")).code == 0
    save(raftkv_client, tmp_path, 200)
    registry = raftkv.checkpoint.Registry(raftkv_client, "job", uri=str(tmp_path / "job"))
    claim = registry.claim()
    ran = ctl(raftkv_cluster, "import", "job", str(tmp_path / "out"))
    assert (ran.code, ran.output) == (1, b"")
    assert ran.errors.startswith("Error: step 100 of run 'job' (dcp) is not above step 200, which is the latest")
    registry.begin(claim, 300).abort("not needed")


def test_foreign_checkpoints_are_imported_and_incomplete_ones_named(raftkv_cluster, raftkv_client, tmp_path):
    old, place = tmp_path / "old", tmp_path / "place"
    for step, weights in ((10, EMPTY_WEIGHTS), (20, EMPTY_WEIGHTS[:-1])):
        directory = old / f"checkpoint-{step}"
        directory.mkdir(parents=True)
        (directory / "model.safetensors").write_bytes(weights)
        (directory / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": []}))
    dry = ctl(raftkv_cluster, "import", "hf", str(old), "--dry-run")
    assert dry.code == 1
    assert [line.split()[0] for line in dry.output.decode().splitlines()[1:]] == ["refused", "found"]
    ran = ctl(raftkv_cluster, "import", "hf", str(old), "--place", str(place), "--json")
    results = {one["path"]: one for one in json.loads(ran.output.decode())["results"]}
    assert {path: one["action"] for path, one in results.items()} == {
        "checkpoint-10": "imported", "checkpoint-20": "refused"
    }  # fmt: skip
    assert results["checkpoint-20"]["reason"]
    assert ran.code == 1
    assert ran.errors == (f"Error: 1 thing in {old} could not be imported, see the lines above\n")
    assert json.loads(text_of(ctl(raftkv_cluster, "latest", "hf", "--json")))["step"] == 10


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["export", "job", "latest"], 128, "checkpoint export needs RUN WHICH DIRECTORY"),
        (["export", "job", "7", "{out}"], 1, "run 'job' has no checkpoint of step 7"),
        (["export", "job", "latest", "nowhere://x"], 128, "cannot use nowhere://x: "),
        (["import", "new", "{empty}"], 128, "run 'new' has no checkpoints yet: name a directory for them, as --place"),
        (["import", "job", "{empty}"], 128, "{empty} has nothing that one of "),
        (["import", "job", "{empty}", "--step=-1"], 128, "step -1 cannot be used"),
    ],
)
def test_words_that_cannot_be(raftkv_cluster, raftkv_client, tmp_path, words, code, text):
    save(raftkv_client, tmp_path, 100)
    names = {"{out}": str(tmp_path / "out"), "{empty}": str(tmp_path / "empty")}
    Path(names["{empty}"]).mkdir()
    ran = ctl(raftkv_cluster, *(names.get(word, word) for word in words))
    assert (ran.code, ran.output) == (code, b"")
    assert ran.errors.startswith(f"Error: {text.replace('{empty}', names['{empty}'])}")
    assert ran.errors.count("\n") == 1


def test_a_shard_that_is_not_what_was_committed_is_not_exported(raftkv_cluster, raftkv_client, tmp_path: Path) -> None:
    saved = save(raftkv_client, tmp_path, 100)
    Path(saved.uri, "1.bin").write_bytes(b"step 100, rank 2")
    ran = ctl(raftkv_cluster, "export", "job", "latest", str(tmp_path / "out"))
    assert (ran.code, ran.output) == (1, b"")
    assert ran.errors.startswith(f"Error: {saved.uri}: 1.bin differs in contents from what was committed; load another")
    assert not Path(tmp_path, "out", "raftkv-checkpoint.json").exists()
