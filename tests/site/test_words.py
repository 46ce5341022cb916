"""What pages name exists: flags of the programs, their commands, methods of clients, files and targets of make."""

from __future__ import annotations

import re

import pytest

import raftkv.aio
from docsite.commands import PAGES as PROGRAMS
from docsite.commands import known_words
from tests.site.test_links import PAGES, ROOT

NAMED = [page for page in PAGES if page not in ("ARCHITECTURE.md", "CHANGELOG.md")]
OURS = re.compile(r"(?<![\w/=-])(raftkv(?:ctl|utl)?)((?: +[^\s|`;&>]+)*)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
CODE = re.compile(r"`([^`\n]+)`")
FOREIGN = {
    *("--rdzv-backend", "--rdzv-conf", "--rdzv-endpoint", "--rdzv-id", "--nnodes", "--nproc-per-node"),
    *("--max-restarts", "--local-addr", "--bind", "--join", "--min", "--stop-timeout"),
    *("--etcd-servers", "--etcd-servers-overrides", "--etcd-compaction-interval"),
    *("--etcd-cafile", "--etcd-certfile", "--etcd-keyfile"),
}
"""Flags of torchrun, podman and kube-apiserver, and the beginnings of those of torchft's own lighthouse."""
OTHERS = re.compile(r"(\$ )?(buildah|helm|kubectl|podman) ")
"""Commands of other programs, which take the words that follow for themselves."""


@pytest.fixture(scope="module")
def flags() -> dict[str, set[str]]:
    return known_words()


def lines_of(page: str) -> list[str]:
    """Return what a page shows as typed: its code, with continued lines joined."""
    text = (ROOT / page).read_text(encoding="utf-8")
    fenced = re.findall(r"^```(?:console|ini|yaml|bash)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return [line for block in fenced for line in re.sub(r"\\\n", " ", block).splitlines()] + CODE.findall(prose)


def test_flags_that_a_page_gives_to_a_program_exist(flags: dict[str, set[str]]) -> None:
    unknown = []
    lines = [(page, line) for page in NAMED for line in lines_of(page)]
    for page, line in lines:
        for found in OURS.finditer("" if OTHERS.match(line) else line.partition("  #")[0]):
            program, words = found[1], found[2].partition(" -- ")[0]
            unknown += [f"{page}: {program} {flag}" for flag in FLAG.findall(words) if flag not in flags[program]]
    assert unknown == []


def own_scripts() -> set[str]:
    """Return the flags of the scripts of the repository: benches, simulators, fault tests."""
    sources = (path for folder in ("bench", "jepsen", "tests") for path in (ROOT / folder).rglob("*.py"))
    return {flag for path in sources for flag in re.findall(r'"(--[a-z][\w-]+)"', path.read_text(encoding="utf-8"))}


def test_flags_that_a_page_names_alone_exist(flags: dict[str, set[str]]) -> None:
    """A flag in prose belongs to one of the programs, to a script of the repository, or to a tool named above."""
    known = set().union(FOREIGN, own_scripts(), *flags.values())
    unknown = []
    for page in NAMED:
        alone = {flag for line in lines_of(page) for flag in FLAG.findall(line) if line.startswith("--")} - known
        begun = {flag for flag in alone if flag.endswith("-") and any(one.startswith(flag) for one in known)}
        unknown += [f"{page}: {flag}" for flag in alone - begun]
    assert unknown == []


def test_commands_that_pages_name_exist() -> None:
    help_of = {name: make() for name, make in PROGRAMS.items()}
    unknown = set()
    for page in NAMED:
        for line in lines_of(page):
            for found in re.finditer(r"(?<![\w/-])(raftkvctl|raftkvutl) +([a-z][a-z-]+)", line):
                if f"## {found[1]} {found[2]}" not in help_of[found[1]] and found[2] not in ("help",):
                    unknown.add((page, found[0]))
    assert sorted(unknown) == []


def test_methods_of_clients_that_pages_name_exist() -> None:
    unknown = set()
    for page in NAMED:
        text = (ROOT / page).read_text(encoding="utf-8")
        for name in re.findall(r"(?<![\w.])kv\.([a-z_]+)", text):
            if not hasattr(raftkv.Client, name) and not hasattr(raftkv.aio.Client, name):
                unknown.add((page, name))
    assert sorted(unknown) == []


def test_targets_of_make_that_pages_name_exist() -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {found for page in NAMED for line in lines_of(page) for found in re.findall(r"\bmake ([a-z][a-z-]+)", line)}
    assert named - targets == set()


def test_modules_that_pages_have_python_run_exist() -> None:
    named = {
        (page, found)
        for page in NAMED
        for line in lines_of(page)
        for found in re.findall(r"python -m ((?:bench|docsite|jepsen|raftkv|tests)[\w.]*)", line)
    }
    places = {found: ROOT / found.replace(".", "/") for _, found in named}
    runs = {
        name: path.with_suffix(".py").is_file() or (path / "__main__.py").is_file() for name, path in places.items()
    }
    assert sorted((page, name) for page, name in named if not runs[name]) == []
