"""The way of a new user, with a watch in the hand: the pages' own commands, typed into a fresh clone.

    .venv/bin/python -m tests.site.path  # prints a line for each step, with its seconds, and a table at the end

It clones the repository as it is committed, installs it, runs three members on one machine, looks at the dashboard,
trains with torchrun through the kill of a worker, and runs three members as on three machines. The pages say what is
typed: a step is a page, or the part of it below one heading. Blocks that tests leave out because they install torch are
played here. It needs about a minute, git, and a source of packages.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.procs import http_get
from tests.site.player import ROOT, Block, Player, blocks, clean_environment, here

START, JOB, OPERATIONS = "docs/start/first-steps.md", "docs/start/training-job.md", "docs/guides/operations.md"
OURS = "python -m tests.site.path plays it"
DASHBOARD = "127.0.0.1:2379"


@dataclass(frozen=True)
class Step:
    """One step: its name, and the part of a page that it plays (all of a page without headings)."""

    name: str
    page: str = ""
    headings: tuple[str, ...] = ()
    check: Callable[[], None] | None = None


def look_at_dashboard() -> None:
    """Load the dashboard's page, and everything that it names, as a browser does."""
    status, _, body = http_get(DASHBOARD, "/ui/")
    if status != 200 or "<script" not in body:
        raise SystemExit(f"http://{DASHBOARD}/ui/ answered {status}: {body[:200]}")


ONE_MACHINE = (
    Step("install, and three members on one machine", START, ("Three members",)),
    Step("put, get, watch, lock, from Python", START, ("Put and get", "Watch", "Lock", "From Python")),
    Step("the dashboard answers", check=look_at_dashboard),
    Step("install torch, or keep it", JOB, ("A first training job#1",)),
    Step("two nodes of torchrun train", JOB, ("A first training job#2",)),
    Step("a worker is killed, and generation 2 trains", JOB, ("A first training job#3",)),
    Step("the job ends well, and its timeline is read", JOB, ("A first training job#4",)),
)
THREE_MACHINES = (Step("three machines: install, start, write", OPERATIONS, ("Three hosts from nothing",)),)


def part(step: Step) -> Iterator[Block]:
    """Return the blocks of a step: those below its headings; ``HEADING#2`` is the second block below one."""
    text = (ROOT / step.page).read_text(encoding="utf-8")
    for heading in step.headings:
        title, _, number = heading.partition("#")
        level = next(line for line in text.splitlines() if line.lstrip("#").strip() == title).partition(" ")[0]
        after = text.split(f"{level} {title}\n", 1)[1].split(f"\n{level} ", 1)[0]
        found = [block for block in blocks(step.page, after) if block.is_played or OURS in block.note]
        yield from found if not number else found[int(number) - 1 : int(number)]


def walk(player: Player, steps: tuple[Step, ...], seconds: dict[str, float]) -> None:
    """Go through some steps; notes what each has taken."""
    for step in steps:
        begin = time.monotonic()
        if step.check is not None:
            step.check()
        for block in part(step) if step.page else ():
            player.play(block)
        note(step.name, time.monotonic() - begin, seconds)


def note(name: str, taken_s: float, seconds: dict[str, float]) -> None:
    """Keep and print how long a step has taken."""
    seconds[name] = taken_s
    print(f"{taken_s:7.1f} s  {name}", flush=True)


def clone(target: Path) -> Path:
    """Clone the repository, as a user does; addresses of hosts are those that play them."""
    subprocess.run(["git", "clone", "-q", f"file://{ROOT}", str(target)], check=True)
    for settings in target.glob("examples/**/*.yml"):
        settings.write_text(here(settings.read_text()))
    return target


def main() -> int:
    """Go the whole way; 0 if every command succeeded."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    seconds: dict[str, float] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="raftkv-path-")))
        home = folder / "home"
        home.mkdir()
        begin = time.monotonic()
        one = clone(folder / "one")
        note("git clone", time.monotonic() - begin, seconds)
        player = stack.enter_context(Player(one, clean_environment(home), "path"))
        walk(player, ONE_MACHINE, seconds)
        three = stack.enter_context(Player(clone(folder / "three"), clean_environment(home), "path"))
        walk(three, THREE_MACHINES, seconds)
    print("\n| step | seconds |\n|---|---:|")
    for name, taken_s in seconds.items():
        print(f"| {name} | {taken_s:.1f} |")
    print(f"| all | {sum(seconds.values()):.1f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
