"""``raftkvctl checkpoint verify`` on checkpoints that the test has saved, and damaged."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cli.checkpoints.registered import ctl, save, text_of
from tests.cli.programs import InTerminal, raftkvctl


def test_a_whole_checkpoint_is_verified(raftkv_cluster, raftkv_client, tmp_path: Path) -> None:
    save(raftkv_client, tmp_path, 100)
    save(raftkv_client, tmp_path, 200)
    assert text_of(ctl(raftkv_cluster, "verify", "job")) == "step 200 (dcp): 2 files, 32 B, all digests match\n"
    both = text_of(ctl(raftkv_cluster, "verify", "job", "--all")).splitlines()
    assert [line.split()[1] for line in both] == ["100", "200"]
    found = json.loads(text_of(ctl(raftkv_cluster, "verify", "job", "100", "--json")))
    assert (found["step"], found["whole"], found["file_count"], found["missing"]) == (100, True, 2, [])


def test_every_damaged_file_is_named(raftkv_cluster, raftkv_client, tmp_path: Path) -> None:
    whole = save(raftkv_client, tmp_path, 100)
    missing, longer, other, bare = (save(raftkv_client, tmp_path, step) for step in (200, 300, 400, 500))
    Path(missing.uri, "0.bin").unlink()
    Path(longer.uri, "1.bin").write_bytes(b"step 300, rank 1, and more")
    Path(other.uri, "1.bin").write_bytes(b"step 400, rank 0")
    Path(bare.uri, "raftkv-manifest.jsonl").write_bytes(b"")
    Path(whole.uri, "notes.txt").write_bytes(b"of a person")
    ran = ctl(raftkv_cluster, "verify", "job", "--all")
    assert ran.code == 1
    assert ran.output == b"step 100 (dcp): 2 files, 32 B, all digests match\n"
    assert ran.errors.splitlines() == [
        "raftkvctl: step 100 (dcp): notes.txt was not committed with the checkpoint; some loaders may read it",
        "raftkvctl: step 200 (dcp): 0.bin is missing",
        "raftkvctl: step 300 (dcp): 1.bin differs in size from what was committed",
        "raftkvctl: step 400 (dcp): 1.bin differs in contents from what was committed",
        f"raftkvctl: step 500 (dcp): {bare.uri}: raftkv-manifest.jsonl is not the one that was committed; load another "
        "checkpoint, and find the cause",
        "Error: step 200 (dcp), 300 (dcp), 400 (dcp), 500 (dcp) of run 'job' cannot be used; load another one, and "
        "find the cause",
    ]
    told = ctl(raftkv_cluster, "verify", "job", "--all", "--json")
    assert told.code == 1
    lines = [json.loads(line) for line in told.output.decode().splitlines()]
    assert [line["whole"] for line in lines] == [True, False, False, False, False]
    assert (lines[1]["missing"], lines[2]["wrong_size"], lines[3]["wrong_digest"]) == (["0.bin"], ["1.bin"], ["1.bin"])


def test_failed_verification_is_one_line(raftkv_cluster, raftkv_client, tmp_path: Path, monkeypatch) -> None:
    both = ctl(raftkv_cluster, "verify", "job", "100", "--all")
    assert (both.code, both.errors) == (128, "Error: checkpoint verify takes --all or WHICH, not both\n")
    none = ctl(raftkv_cluster, "verify", "job", "--all")
    assert (none.code, none.errors) == (1, "Error: run 'job' has no checkpoints to verify\n")
    save(raftkv_client, tmp_path, 100)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    bare = ctl(raftkv_cluster, "verify", "job")
    assert (bare.code, bare.output) == (128, b"")
    assert bare.errors == "Error: files at a URL need fsspec: pip install 'raftkv[checkpoint]'\n"


@pytest.mark.long
def test_a_terminal_shows_a_bar(raftkv_cluster, raftkv_client, tmp_path: Path) -> None:
    save(raftkv_client, tmp_path, 100)
    with InTerminal(raftkvctl(raftkv_cluster.endpoints[0], "checkpoint", "verify", "job")) as terminal:
        assert terminal.process.wait(90) == 0
    assert "verifying step 100" in terminal.shown
    assert "all digests match" in terminal.shown
