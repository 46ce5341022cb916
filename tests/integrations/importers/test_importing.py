"""An import into a registry: oldest first, once, with bytes and metrics; what is refused leaves the others alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import raftkv.checkpoint
from raftkv.checkpoint import exchange
from raftkv.checkpoint.commit.manifest import Manifest
from raftkv.checkpoint.errors import FenceBroken
from raftkv.checkpoint.storage.place import Place
from raftkv.errors import ConfigError
from tests.integrations.importers import fabricated as made


@pytest.fixture
def registry(raftkv_client, tmp_path) -> raftkv.checkpoint.Registry:
    return raftkv.checkpoint.Registry(raftkv_client, "job", uri=str(tmp_path / "registry"))


@pytest.fixture
def output(tmp_path) -> Path:
    """A job that was stopped while it saved step 300."""
    for step, loss in ((100, 0.5), (200, 0.25), (300, 0.125)):
        made.write(tmp_path / f"output/checkpoint-{step}", made.trainer(step, eval_loss=loss))
    (tmp_path / "output/checkpoint-300/trainer_state.json").unlink()
    return tmp_path / "output"


def test_complete_checkpoints_are_imported_once_oldest_first(registry, output):
    first = registry.import_directory(str(output))
    assert [(done.step, done.action) for done in first] == [(300, "refused"), (100, "imported"), (200, "imported")]
    assert "checkpoint-300/trainer_state.json is missing" in first[0].reason
    latest = registry.latest()
    assert (latest.step, latest.kind, latest.metrics) == (200, "safetensors", {"eval_loss": 0.25})
    assert latest.metadata["imported_from"] == f"{output}/checkpoint-200"
    assert registry.best("eval_loss", "max").step == 100
    again = registry.import_directory(str(output))
    assert [done.action for done in again] == ["refused", "skipped", "skipped"]
    assert json.loads(json.dumps([done.plain() for done in first]))[1]["file_count"] == 7


def test_the_bytes_are_those_of_the_source_under_the_names_that_tools_load(registry, tmp_path):
    made.write(tmp_path / "old/iter_0000400", made.megatron())
    made.write(tmp_path / "old/step-3", made.dcp())
    for done in registry.import_directory(str(tmp_path / "old")):
        keep = "iter_0000400/" if done.kind == "megatron_dist" else ""
        files = made.megatron() if keep else made.dcp()
        place = Path(done.uri)
        assert {name: (place / keep / name).read_bytes() for name in files} == files
        manifest = Manifest.decode((place / "raftkv-manifest.jsonl").read_bytes())
        assert {file.name: file.size_bytes for _, file in manifest.files} == {
            keep + name: len(data) for name, data in files.items()
        }


def test_a_dry_run_changes_nothing(registry, output, raftkv_client):
    results = registry.import_directory(str(output), dry_run=True)
    assert [done.action for done in results] == ["refused", "found", "found"]
    assert raftkv_client.count("/raftkv/", prefix=True) == 0


def test_the_step_and_kind_of_what_says_neither_are_given(registry, tmp_path):
    made.write(tmp_path / "final", {"model.safetensors": made.safetensors()})
    (refused,) = registry.import_directory(str(tmp_path / "final"))
    assert (refused.action, refused.reason) == ("refused", "neither its name nor its files say its step; give the step")
    (done,) = registry.import_directory(str(tmp_path / "final"), step=7, kind="files")
    assert (done.action, registry.at(7).kind) == ("imported", "files")
    made.write(tmp_path / "final/checkpoint-4", made.trainer(4))
    with pytest.raises(ConfigError, match="has 2 checkpoints, and one step cannot be that of all"):
        registry.import_directory(str(tmp_path / "final"), step=7)
    with pytest.raises(ConfigError, match="has nothing that one of"):
        registry.import_directory(str(made.write(tmp_path / "empty", {"notes.txt": b"x"})))


def test_last_of_lightning_is_the_same_step_again(registry, tmp_path):
    names = ("epoch=0-step=4.ckpt", "last.ckpt", "epoch=0-step=2.ckpt")
    made.write(tmp_path / "c", {name: made.torch_file(global_step=2 if "2" in name else 4) for name in names})
    results = registry.import_directory(str(tmp_path / "c"))
    assert [(done.path, done.action) for done in results] == [
        ("epoch=0-step=2.ckpt", "imported"),
        ("epoch=0-step=4.ckpt", "imported"),
        ("last.ckpt", "skipped"),
    ]


def test_a_step_below_the_latest_is_skipped(registry, output):
    claim = registry.claim()
    attempt = registry.begin(claim, 150, kind="safetensors")
    attempt.prepare(0, [])
    attempt.commit()
    results = registry.import_directory(str(output), claim=claim)
    assert [(done.step, done.action) for done in results] == [(300, "refused"), (100, "skipped"), (200, "imported")]


def test_an_import_ends_the_claims_before_it_only_if_it_writes(registry, output, tmp_path):
    claim = registry.claim()
    registry.import_directory(str(output), dry_run=True)
    registry.begin(claim, 1).abort("not needed")
    attempt = registry.begin(claim, 200, kind="safetensors")
    attempt.prepare(0, [])
    attempt.commit()
    assert [done.action for done in registry.import_directory(str(output))] == ["refused", "skipped", "skipped"]
    registry.begin(claim, 300).abort("not needed")
    made.write(output / "checkpoint-250", made.trainer(250))
    registry.import_directory(str(output))
    with pytest.raises(FenceBroken):
        registry.begin(claim, 400)


def test_a_file_that_is_still_written_is_refused_and_the_next_import_goes_on(registry, output, monkeypatch):
    chunks = Place.chunks

    def growing(self, name, *arguments):
        if name == "optimizer.pt" and self.uri.endswith("-200"):
            with open(self.path(name), "ab") as file:
                file.write(b"more")
        return chunks(self, name, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Place, "chunks", growing)
        results = registry.import_directory(str(output))
    assert [done.action for done in results] == ["refused", "imported", "refused"]
    assert "optimizer.pt had" in results[2].reason
    assert registry.latest().step == 100
    made.write(output / "checkpoint-200", made.trainer(200))
    assert [done.action for done in registry.import_directory(str(output))] == ["refused", "skipped", "imported"]


def test_what_is_bad_in_a_directory_is_named_and_the_rest_comes_in(registry, output, tmp_path):
    """A name with a backslash, or one link, was the end of the whole import."""
    made.write(tmp_path / "elsewhere/checkpoint-400", made.trainer(400))
    (output / "checkpoint-100/a\\b.json").write_bytes(b"{}")
    (output / "notes\\.txt").write_bytes(b"of no tool")
    (output / "best").symlink_to("checkpoint-200")
    (output / "checkpoint-400").symlink_to(tmp_path / "elsewhere/checkpoint-400")
    (output / "latest").symlink_to("/etc/hostname")
    results = registry.import_directory(str(output))
    assert [(done.path, done.step, done.action) for done in results] == [
        ("best/", None, "skipped"),
        ("checkpoint-400/", None, "skipped"),
        ("latest", None, "skipped"),
        (r"notes\.txt", None, "skipped"),
        ("checkpoint-100", 100, "refused"),
        ("checkpoint-300", 300, "refused"),
        ("checkpoint-200", 200, "imported"),
    ]
    assert [done.reason for done in results[:3]] == [
        "best/ is a link to a directory; put the directory there",
        "checkpoint-400/ is a link that leads out of the directory; put the files there",
        "latest is a link that leads out of the directory; put the files there",
    ]
    (tmp_path / "links").mkdir()
    (tmp_path / "links/checkpoint-400").symlink_to(tmp_path / "elsewhere/checkpoint-400")
    with pytest.raises(ConfigError, match=r"has nothing .* \(checkpoint-400/ is a link that leads out"):
        registry.import_directory(str(tmp_path / "links"))
    assert r"'checkpoint-100/a\\b.json' cannot be used" in results[4].reason


def test_place_whose_name_is_no_text_is_imported_all_the_same(registry, tmp_path):
    place = tmp_path / os.fsdecode(b"caf\xe9")
    made.write(place / "checkpoint-100", made.trainer(100))
    assert [done.action for done in registry.import_directory(str(place))] == ["imported"]
    assert registry.latest().metadata["imported_from"] == f"{tmp_path}/caf?/checkpoint-100"


def test_more_files_than_one_rank_can_prepare_come_in(registry, tmp_path, monkeypatch):
    monkeypatch.setattr(exchange, "PREPARED_MAX_BYTES", 1000)
    made.write(tmp_path / "step-4", made.dcp(20))
    (done,) = registry.import_directory(str(tmp_path / "step-4"))
    latest = registry.latest()
    assert (done.action, done.file_count, latest.file_count, latest.world_size) == ("imported", 21, 21, 6)


def test_a_checkpoint_of_another_registry_comes_in_without_what_that_has_written(registry, output, raftkv_client):
    registry.import_directory(str(output))
    other = raftkv.checkpoint.Registry(raftkv_client, "other", uri=f"{registry.uri}-other")
    assert [(done.step, done.action) for done in other.import_directory(registry.uri)] == [
        (100, "imported"),
        (200, "imported"),
    ]


def test_import_first_commits_attempts_of_a_dead_writer(registry, output):
    attempt = registry.begin(registry.claim(), 50, kind="safetensors")
    attempt.prepare(0, [])
    registry.import_directory(str(output))
    assert [found.step for found in registry.checkpoints()] == [50, 100, 200]
