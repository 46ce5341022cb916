"""Checkpoints on a real local server of S3's protocol (moto), through s3fs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.foreign.environments import ROOT, interpreter

PATIENCE_S = 240


@pytest.mark.long
def test_checkpoints_on_an_object_store(tmp_path: Path) -> None:
    ran = subprocess.run(
        [str(interpreter("s3")), "-m", "tests.foreign.s3_job", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["files"] == {
        "large": [70 << 20, True],  # the upload was in parts
        "read": "[b]?",
        "names": ["[b]?", "a1", "large", "sub/c"],  # a name with a star is a name
        "after giving up": ["[b]?", "a1", "large", "sub/c"],
        "open uploads": 0,
        "left": [0, 4, ["step-000000000001.g1.11"]],  # a neighbour whose name goes on stays
    }
    assert found["failures"] == [
        "StorageError: cannot write s3://no-such-bucket/job/a: The specified bucket does not exist; "
        "check that the directory or bucket exists",
        "StorageError: cannot read s3://no-such-bucket/job/a: The specified bucket does not exist; "
        "check that the directory or bucket exists",
        "StorageError: cannot read s3://bucket/some/job/nothing: there is no such file; "
        "check that the directory or bucket exists",
    ]
    assert found["registry"] == {
        "deleted": [2],
        "orphans": 1,
        "failures": [],
        "directories": 3,
        "whole": [True, True, True],
        "read": 100_000,
        "copies": True,
        "damaged": ["sub/a.bin"],
    }
