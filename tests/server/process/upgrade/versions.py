"""Older versions of raftkv from the history of this checkout, unpacked to run beside this one."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.procs import ROOT

THIS = "this version"

FIRST = "5a05069"
"""The last commit of 0.1: members say nothing of their version, a broken copy begins anew, quotas are unknown."""


def _git(*arguments: str) -> bytes:
    """What git prints; nothing where there is no git, or no history."""
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return b""


def versions() -> list[str]:
    """Return all older versions that the history has; of a clone without one, this.

    Members of this version alone do nothing in an upgrade that they do not do beside older ones.
    """
    tags = _git("tag", "--list", "v*").decode().split()
    return [name for name in [FIRST, *tags] if _git("rev-parse", "--verify", f"{name}^{{commit}}")] or [THIS]


def unpack(version: str, directory: Path) -> Path:
    """Put a version where ``PYTHONPATH`` can name it, and return the place."""
    if version == THIS:
        return ROOT
    # Not by tarfile: before Python 3.11.4 it has no filter, from 3.14 on it must not be without one.
    subprocess.run(["tar", "-x", "-C", str(directory)], input=_git("archive", version), check=True)
    return directory
