"""Plays the commands of README and docs, block by block, in a fresh clone with an empty home.

A block is fenced as ```console: lines that begin with `$ ` are commands (`\\` at the end continues one), the others are
what they print, which is for people. Its commands must succeed, one after another, in the folder of the clone. A
comment on the line before a block changes that:

    <!-- not played: WHY -->            it is left out
    <!-- stays until the end: CHECK --> its one command goes on in the background; play on when CHECK succeeds

Run it by hand for one page: `pytest tests/test_documentation.py::test_commands_of_a_page_succeed[README.md]`.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.procs import wait_for

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
COMMAND_TIMEOUT_S = 300
READY_TIMEOUT_S = 300
NOT_PLAYED, STAYS = "not played: ", "stays until the end: "
BLOCK = re.compile(
    r"^(?:<!-- (?P<note>[^\n]*) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
SHELL = re.compile(r"^(\$ |make |(\.venv/bin/)?(raftkv(ctl)?|torchrun|pip|python) )", re.MULTILINE)
INDENTED = re.compile(r"^ {4}\$ ", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One block of a page."""

    language: str
    text: str
    note: str

    @property
    def commands(self) -> list[str]:
        """What is typed."""
        lines = re.sub(r"\\\n", " ", self.text).splitlines()
        return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]

    @property
    def is_played(self) -> bool:
        """It has commands, and nothing says why they are not to be tried."""
        return self.language == "console" and not self.note.startswith(NOT_PLAYED)


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [Block(found["language"], found["text"], found["note"] or "") for found in BLOCK.finditer(text)]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_in_a_block_that_is_played_or_says_why_not(page: str) -> None:
    for block in blocks(page):
        if block.language == "console":
            assert block.commands, block.text
            assert not block.note.startswith(STAYS) or len(block.commands) == 1, "one command stays, and no other waits"
        else:
            assert block.language == "python" or not SHELL.search(block.text), f"fence it as console:\n{block.text}"
    assert not INDENTED.search((ROOT / page).read_text(encoding="utf-8")), (
        "fence commands as console, with $ before them"
    )


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What git knows of, as it stands here, and nothing else."""
    target = tmp_path_factory.mktemp("clone") / "raftkv"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.split("\0"):
        if name and ((ROOT / name).exists() or (ROOT / name).is_symlink()):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    return target


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An empty home, and of this process's environment what reaches programs and the network."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in ("PATH", "LANG") or re.match("PIP_|https?_|no_", name)
    }
    return {**kept, "HOME": str(tmp_path_factory.mktemp("home"))}


@contextmanager
def staying(command: str, check: str, clone: Path, environment: dict[str, str]) -> Iterator[None]:
    """A command in the background."""
    log = clone.parent / "stays.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, shell=True, cwd=clone, env=environment, stdout=output, stderr=output, start_new_session=True
        )

    def ready() -> bool:
        assert process.poll() is None, f"$ {command}\n{log.read_text(encoding='utf-8', errors='replace')}"
        done = subprocess.run(check, shell=True, cwd=clone, env=environment, capture_output=True, check=False)
        return done.returncode == 0

    try:
        wait_for(ready, f"{check} after {command}", READY_TIMEOUT_S)
        yield
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(COMMAND_TIMEOUT_S)


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page in PAGES if any(block.is_played for block in blocks(page))])
def test_commands_of_a_page_succeed(page: str, clone: Path, environment: dict[str, str]) -> None:
    with ExitStack() as background:
        for block in blocks(page):
            if not block.is_played:
                continue
            if block.note.startswith(STAYS):
                (command,) = block.commands
                background.enter_context(staying(command, block.note.removeprefix(STAYS), clone, environment))
                continue
            for command in block.commands:
                done = subprocess.run(
                    command,
                    shell=True,
                    cwd=clone,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    timeout=COMMAND_TIMEOUT_S,
                    check=False,
                )
                assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}"
