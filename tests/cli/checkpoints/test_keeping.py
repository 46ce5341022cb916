"""``raftkvctl checkpoint pin|unpin|tag|untag|gc`` on checkpoints that the test has saved."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

import raftkv
from raftkv.checkpoint.keys import AttemptId, RegistryKeys
from raftkv.checkpoint.records import Deleting
from tests.cli.checkpoints.registered import ctl, save, text_of


def kept_as(cluster, step: int) -> list[str]:
    return json.loads(text_of(ctl(cluster, "show", "job", str(step), "--json")))["kept_as"]


def test_pins_are_taken_and_given_back(raftkv_cluster, raftkv_client, tmp_path: Path) -> None:
    save(raftkv_client, tmp_path, 100)
    save(raftkv_client, tmp_path, 200)
    pinned = text_of(ctl(raftkv_cluster, "pin", "job", "100", "--reader", "eval", "--for", "90m0.5s"))
    assert pinned == "step 100 of run 'job' is pinned by 'eval' for 1 h 30 min\n"
    told = json.loads(text_of(ctl(raftkv_cluster, "pin", "job", "100", "--reader", "paper", "--json")))
    assert told == {"run_id": "job", "step": 100, "reader": "paper", "duration_s": 0}
    assert kept_as(raftkv_cluster, 100) == ["pinned by eval", "pinned by paper"]
    (forever, timed) = sorted(
        raftkv_client.range("/raftkv/checkpoint/run/job/hold/", prefix=True), key=lambda i: i.lease
    )
    assert forever.lease == 0
    assert raftkv_client.lease_info(timed.lease).granted_ttl == 5401
    assert (
        text_of(ctl(raftkv_cluster, "unpin", "job", "100", "--reader", "eval")) == "1 pin of 'eval' on step 100 gone\n"
    )
    assert kept_as(raftkv_cluster, 100) == ["pinned by paper"]
    none = ctl(raftkv_cluster, "unpin", "job", "100", "--reader", "eval")
    assert (none.code, none.errors) == (1, "Error: step 100 of run 'job' has no pin of 'eval'; `show` names its pins\n")


def test_tags_are_put_moved_and_taken_away(raftkv_cluster, raftkv_client, tmp_path: Path) -> None:
    save(raftkv_client, tmp_path, 100)
    save(raftkv_client, tmp_path, 200)
    assert text_of(ctl(raftkv_cluster, "tag", "job", "release")) == "tag 'release' of run 'job' is on step 200\n"
    assert json.loads(text_of(ctl(raftkv_cluster, "tag", "job", "release", "100", "--json")))["step"] == 100
    assert (kept_as(raftkv_cluster, 100), kept_as(raftkv_cluster, 200)) == (["tag release"], [])
    assert json.loads(text_of(ctl(raftkv_cluster, "show", "job", "tag:release", "--json")))["step"] == 100
    assert text_of(ctl(raftkv_cluster, "untag", "job", "release")) == "tag 'release' of run 'job' is gone\n"
    gone = ctl(raftkv_cluster, "untag", "job", "release")
    assert (gone.code, gone.errors) == (1, "Error: run 'job' has no tag 'release'; `list` shows the tags\n")


def test_gc_deletes_what_no_rule_keeps_and_says_why(raftkv_cluster, raftkv_client, tmp_path: Path) -> None:
    losses = {100: 0.5, 200: 0.1, 300: 0.9, 400: 0.7}
    saved = {step: save(raftkv_client, tmp_path, step, loss=loss) for step, loss in losses.items()}
    assert ctl(raftkv_cluster, "tag", "job", "release", "100").code == 0
    place = f"--place={Path(saved[100].uri).parent}"
    words = ("gc", "job", "--keep-last=1", "--keep-best=loss:min:1")
    dry = text_of(ctl(raftkv_cluster, *words, "--dry-run")).splitlines()
    rows = [re.split(r" {2,}", line) for line in dry[1:5]]
    assert [(row[0], row[4], row[5]) for row in rows] == [
        ("100", "stays", "held: tag release"),
        ("200", "stays", "best 1 by loss"),
        ("300", "would go", "no rule keeps it"),
        ("400", "stays", "latest, last 1"),
    ]
    assert dry[-1] == "1 of 4 checkpoints would be deleted, 32 B; 0 directories of dead attempts"
    assert Path(saved[300].uri).exists()
    unplaced = ctl(raftkv_cluster, *words)
    assert (unplaced.code, unplaced.errors.count("the place of the checkpoints is not named")) == (1, 1)
    done = json.loads(text_of(ctl(raftkv_cluster, *words, place, "--json")))
    assert [(one["step"], one["why"]) for one in done["deleted"]] == [(300, ["no rule keeps it"])]
    assert (done["dry_run"], [one["step"] for one in done["kept"]]) == (False, [100, 200, 400])
    assert not Path(saved[300].uri).exists()
    assert ctl(raftkv_cluster, "show", "job", "300").code == 1
    attempt = AttemptId(1, 1, 1)
    planted = RegistryKeys("job").deleting("files", attempt)
    raftkv_client.put(planted, Deleting(f"memory://\x1b[2J/{attempt.directory}").encode())
    refused = ctl(raftkv_cluster, "gc", "job", place)
    assert (refused.code, "memory://\\x1b[2J/" in refused.errors, "\x1b" in refused.errors) == (1, True, False)
    raftkv_client.put(planted, Deleting("memory://\x1b[2J\norphan: x").encode())
    left = text_of(ctl(raftkv_cluster, "gc", "job")).splitlines()
    assert "aborted attempt: memory://\\x1b[2J\\norphan: x" in left
    assert left[-1] == "0 of 3 checkpoints deleted, 0 B; 1 directory of dead attempts"
    bounded = json.loads(text_of(ctl(raftkv_cluster, "gc", "job", "--max-bytes=64B", "--keep-last=1", "--json", place)))
    assert [one["step"] for one in bounded["deleted"]] == [200]


def test_gc_takes_what_dead_attempts_have_left(raftkv_cluster, raftkv_client, tmp_path: Path) -> None:
    saved = Path(save(raftkv_client, tmp_path, 100).uri)
    registry_uri = saved.parent
    orphan = registry_uri / "step-000000000050.g1.7"
    orphan.mkdir()
    (orphan / "0.bin").write_bytes(b"of a writer that was killed")
    unknown = shutil.copytree(saved, registry_uri / "step-000000000051.g1.7")
    raftkv.checkpoint.Registry(raftkv_client, "job").claim()  # the generation of that writer is over
    done = text_of(ctl(raftkv_cluster, "gc", "job", "--place", str(registry_uri)))
    assert f"orphan: {orphan}\n" in done
    assert (
        f"a complete checkpoint that is not in the registry, it is kept: {unknown} (import it, or delete it)\n" in done
    )
    assert done.endswith("0 of 1 checkpoint deleted, 0 B; 1 directory of dead attempts\n")
    assert (orphan.exists(), unknown.exists()) == (False, True)


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["pin", "job", "7"], 1, "run 'job' has no checkpoint of step 7"),
        (["pin", "job", "--reader", "a/b"], 128, "reader 'a/b' cannot be used"),
        (["pin", "job", "--for=-1h"], 128, "a checkpoint is pinned for a time from 0 s on"),
        (["tag", "job"], 128, "checkpoint tag needs RUN NAME [WHICH]"),
        (["tag", "job", ".."], 128, "tag '..' cannot be used"),
        (["untag", "job", "x"], 1, "run 'job' has no tag 'x'"),
        (["gc", "job", "--keep-best=loss:least"], 128, "the best is the min or the max of a metric, not the 'least'"),
        (["gc", "job", "--keep-best=loss:min:two"], 128, "--keep-best 'loss:min:two' is not METRIC, METRIC:MODE or"),
        (["gc", "job", "--keep-last=-1"], 128, "keep_last of a retention policy cannot be -1"),
        (["gc", "job", "--max-bytes=lots"], 128, "--max-bytes 'lots' is not a size: write 1000, 64KiB or 2GB"),
    ],
)
def test_words_that_cannot_be(raftkv_cluster, raftkv_client, tmp_path, words, code, text):
    save(raftkv_client, tmp_path, 100)
    ran = ctl(raftkv_cluster, *words)
    assert (ran.code, ran.output) == (code, b"")
    assert ran.errors.startswith(f"Error: {text}")
    assert ran.errors.count("\n") == 1
