"""URLs beside etcd's own flags: what one takes, the other takes."""

from __future__ import annotations

import subprocess

import pytest

from tests.cli.test_urls import ALL, TAKEN
from tests.procs import find_tool

NEWER = ("unix:///", "unixs:///")
"""Taken since etcd 3.5.10."""
STRICTER = "at most 65535"


@pytest.mark.long
@pytest.mark.parametrize(
    ("url", "is_taken"),
    [(url, True) for url in TAKEN if not url.startswith(NEWER)]
    + [(url, False) for url, words in ALL if "\0" not in url and words != STRICTER],
)
def test_etcd_takes_the_same_urls(url: str, is_taken: bool) -> None:
    command = [find_tool("etcd"), f"--advertise-client-urls={url}", "--version"]
    assert (subprocess.run(command, capture_output=True, check=False).returncode == 0) is is_taken
