"""Plays the commands of README and docs, each page in a fresh clone: ``tests/site/player.py`` says how.

Run it by hand for one page: `pytest --all tests/test_documentation.py -k guides/operations`.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.site.player import EXPORT, PAGES, ROOT, STAYS, Player, blocks, clean_environment, clone_to

__all__ = ["EXPORT", "ON_MACHINES", "ROOT", "blocks", "clone"]  # for pages that are played in another way
ON_MACHINES = ["docs/guides/deployment.md"]
"""Pages that are played on hosts with a systemd, by `tests/deploy/test_page.py`."""

SHELL = re.compile(r"^(\$ |make |(\.venv/bin/)?(raftkv(ctl|utl)?|torchrun|pip|python) )", re.MULTILINE)
ENDLESS = re.compile(r"(make|(\.venv/bin/)?raftkv) cluster\b(?!.*(&|--help))")
INDENTED = re.compile(r"^ {4}\$ ", re.MULTILINE)


def test_every_command_is_in_a_block_that_is_played_or_says_why_not() -> None:
    found = [(page, block) for page in PAGES for block in blocks(page)]
    for page, block in found:
        where = f"in {page}:\n{block.text}"
        if block.language == "console":
            assert block.commands, where
            stays = block.note.startswith(STAYS)
            assert not stays or len(block.commands) == 1, f"one command stays, and no other waits, {where}"
            endless = [command for command in block.commands if ENDLESS.match(command)]
            assert stays or not block.is_played or not endless, f"it never ends: &, or stays, {where}"
        else:
            assert block.language == "python" or not SHELL.search(block.text), f"fence it as console {where}"
    indented = [page for page in PAGES if INDENTED.search((ROOT / page).read_text(encoding="utf-8"))]
    assert indented == [], "fence commands as console, with $ before them"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return clean_environment(tmp_path_factory.mktemp("home"))


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    return clone_to(tmp_path / "raftkv")


BESIDE_ETCD = ["docs/guides/kubernetes.md"]
"""Pages that move data from and to real etcd, which no clone installs: `tests/compat/kubernetes/test_guide.py`."""
PLAYED = [
    page
    for page in PAGES
    if page not in [*ON_MACHINES, *BESIDE_ETCD] and any(block.is_played for block in blocks(page))
]
LOCAL = [page for page in PLAYED if any(block.commands[:1] == ["make cluster"] for block in blocks(page))]
"""Pages that begin with a cluster on this machine: one environment does for all, which takes as long as the rest."""


@pytest.mark.long
@pytest.mark.parametrize("pages", [LOCAL, *([page] for page in PLAYED if page not in LOCAL)], ids=", ".join)
def test_commands_of_a_page_succeed(pages: list[str], clone: Path, environment: dict[str, str]) -> None:
    for page in pages:
        with Player(clone, environment, page) as player:
            for block in blocks(page):
                if block.is_played:
                    player.play(block)
        shutil.rmtree(clone / "cluster-data", ignore_errors=True)
