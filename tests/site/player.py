"""Plays pages: the commands of README and docs, block by block, in a clone with an empty home.

A block is fenced as ```console: lines that begin with `$ ` are commands (`\\` at the end continues one), the others are
what they print, which is for people. Its commands must succeed, one after another, in the folder of the clone, with
`.venv/bin` on the path; `export NAME=VALUE` holds for the rest of the page, and what a page leaves running ends with
it. Hosts 10.0.0.x are played by addresses of this machine. A comment on the line before a block changes that:

    <!-- not played: WHY -->            it is left out
    <!-- stays until the end: CHECK --> its one command goes on in the background; play on when CHECK succeeds

`tests/test_documentation.py` plays each page in a clone of its own, and `tests/site/path.py` the way of a new user
through several, with a watch in the hand.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.procs import wait_for

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
COMMAND_TIMEOUT_S = 300
READY_TIMEOUT_S = 300
NOT_PLAYED, STAYS = "not played: ", "stays until the end: "
BLOCK = re.compile(
    r"^(?:<!-- (?P<note>[^\n]*) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


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
        """Return whether it has commands, and nothing says why they are not to be tried."""
        return self.language == "console" and not self.note.startswith(NOT_PLAYED)


HOSTS, PLAYED_BY = "10.0.0.", "127.77.0."
EXPORT = re.compile(r"export (\w+)=(\S*)")
MARK = "RAFTKV_PLAYED_PAGE"


def here(text: str) -> str:
    """A text with this machine's addresses instead of the hosts'."""
    return text.replace(HOSTS, PLAYED_BY)


def blocks(page: str, part: str | None = None) -> list[Block]:
    """Return the blocks of a page, or of a part of its text."""
    text = (ROOT / page).read_text(encoding="utf-8") if part is None else part
    return [Block(found["language"], found["text"], found["note"] or "") for found in BLOCK.finditer(text)]


def clone_to(target: Path) -> Path:
    """Copy what git knows of, as it stands here, and what Python has compiled of it: each member would do so again."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    compiled = (path for folder in ("raftkv", "storage") for path in (ROOT / folder).rglob("__pycache__/*.pyc"))
    for name in [*listed.split("\0"), *(str(path.relative_to(ROOT)) for path in compiled)]:
        if name and ((ROOT / name).exists() or (ROOT / name).is_symlink()):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    for settings in target.glob("examples/**/*.yml"):
        settings.write_text(here(settings.read_text()))
    return target


def clean_environment(home: Path) -> dict[str, str]:
    """Return an empty home, and of this process's environment what reaches programs and the network."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in ("PATH", "LANG") or re.match("PIP_|https?_|no_", name)
    }
    return {**kept, "HOME": str(home)}


@contextmanager
def ended(mark: str) -> Iterator[None]:
    """At its end every process ends that has the mark in its environment."""
    try:
        yield
    finally:
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if f"{MARK}={mark}".encode() in path.read_bytes().split(b"\0"):
                    os.kill(int(path.parent.name), signal.SIGKILL)


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
        with suppress(ProcessLookupError):  # it has ended, as the failure says
            os.killpg(process.pid, signal.SIGINT)
        process.wait(COMMAND_TIMEOUT_S)


class Player:
    """Types the commands of blocks; what they leave running ends with it.

    Arguments:
        clone: the folder that they are typed in.
        environment: see ``clean_environment``.
        mark: names this player among others on the machine.
    """

    def __init__(self, clone: Path, environment: dict[str, str], mark: str) -> None:
        self.clone = clone
        path = f"{clone / '.venv' / 'bin'}:{environment['PATH']}"
        self.environment = {**environment, "PATH": path, MARK: f"{mark} {clone}"}
        self._background = ExitStack()

    def __enter__(self) -> Player:
        self._background.enter_context(ended(self.environment[MARK]))
        return self

    def __exit__(self, *_: object) -> None:
        self._background.close()

    def play(self, block: Block) -> None:
        """Type the commands of a block."""
        if block.note.startswith(STAYS):
            (command,) = block.commands
            check = block.note.removeprefix(STAYS)
            self._background.enter_context(staying(command, check, self.clone, self.environment))
            return
        for command in map(here, block.commands):
            if exported := EXPORT.fullmatch(command):
                self.environment[exported[1]] = exported[2]
            else:
                play(command, self.clone, self.environment)


def play(command: str, clone: Path, environment: dict[str, str]) -> None:
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
    logs = "".join(f"{path.name}: {path.read_text()[-500:]}\n" for path in sorted(clone.glob("*.log")))
    assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}\n{logs}"
