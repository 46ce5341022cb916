"""The ledger: one line for every run, to count what was tested, and on which commit."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from jepsen.db import ROOT

LEDGER = ROOT / "jepsen" / "LEDGER.jsonl"


def add(entry: dict[str, Any], path: Path = LEDGER) -> None:
    """Append a line to the ledger.

    Arguments:
        entry: fields of the line; the commit is added.
        path: path of the ledger.
    """
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"commit": commit(), **entry}, separators=(", ", ": ")) + "\n")


def commit() -> str:
    """Return the commit under test, with ``-dirty`` if files of the product differ from it."""
    described = _git("rev-parse", "--short=12", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", "raftkv", "storage", "proto", "jepsen/*.py")
    return described + ("-dirty" if changed else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()
