"""Every page is in the site's navigation, and every link and anchor of it leads somewhere, in a checkout too."""

from __future__ import annotations

import contextlib
import re
import subprocess
from pathlib import Path

import pytest
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[2]
TOP = ["README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md"]
PAGES = [*TOP, *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
README_LINES_MAX = 90
FOLDER_FILES_MAX = 20
NAMED_FILE = re.compile(r"\b(?<![/.])(?:bench|docs|jepsen|requirements|tests)/[\w/-]+\.(?:md|py|tla)\b")
NAMED_MODULE = re.compile(r"``([a-z_]+)\.((?!py|go\b)[a-z_]+)(?:\.([a-z_]+))?(?:\.\w+)*(?:\(\))?``")
NOT_ROOMS = {"auth", "jax", "lease", "lock", "loop", "raft", "raftkv", "torch", "watch"}
"""Rooms with the name of a foreign package, or of a variable in examples."""
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
slug = slugify(case="lower")


def text_of(page: str) -> str:
    """Return a page without its blocks of code."""
    return FENCED.sub("", (ROOT / page).read_text(encoding="utf-8"))


def anchors(page: str) -> set[str]:
    """Return the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+?)(?: \{ *#([\w-]+) *\})?$", text_of(page), re.MULTILINE)
    return {given or slug(heading.replace("`", ""), "-") for heading, given in headings}


def links(page: str) -> list[tuple[str, str]]:
    """Return the file and the anchor that each link inside the repository leads to."""
    found = re.findall(r"\]\(([^)\s]+)\)|(?:href|src)=\"([^\"]+)\"", text_of(page))
    inside = [one or other for one, other in found if "://" not in (one or other)]
    return [(path or Path(page).name, anchor) for path, _, anchor in (link.partition("#") for link in inside)]


def test_links_of_pages_lead_somewhere() -> None:
    found = [(page, *link) for page in PAGES for link in links(page)]
    for page, path, anchor in found:
        target = (ROOT / page).parent / path
        assert target.is_file(), f"{page}: {path}"
        if anchor and target.suffix == ".md":
            name = str(target.resolve().relative_to(ROOT))
            assert anchor in anchors(name) or not name.startswith("docs/"), f"{page}: {path}#{anchor}"


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """Return the text of every tracked file, by its path."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    read = {}
    for file in tracked.rstrip("\0").split("\0"):
        with contextlib.suppress(OSError, UnicodeDecodeError):  # links to folders; pictures
            read[file] = (ROOT / file).read_text(encoding="utf-8")
    return read


def test_files_that_other_files_name_exist(texts: dict[str, str]) -> None:
    """Check heads of units and docstrings too: no reader clicks there, so a file that moves leaves them behind."""
    named: dict[str, set[str]] = {}
    for file, text in texts.items():
        for page in NAMED_FILE.findall(text):
            named.setdefault(page, set()).add(file)
    assert len(named) > 10, "few files name any: the pattern finds nothing"
    assert {page: files for page, files in named.items() if not (ROOT / page).is_file()} == {}


def test_modules_that_sources_name_exist(texts: dict[str, str]) -> None:
    """Check ``room.module`` in docstrings and comments: a module that moves leaves these names behind."""
    sources = {file: text for file, text in texts.items() if file.endswith(".py")}
    modules = [tuple(file.removesuffix(".py").removesuffix("/__init__").split("/")) for file in sources]
    rooms = {part for parts in modules if parts[0] in ("raftkv", "storage") for part in parts[:-1]} - NOT_ROOMS
    known = {parts[start:] for parts in modules for start in range(len(parts))}
    named = {(file, *name) for file, text in sources.items() for name in NAMED_MODULE.findall(text) if name[0] in rooms}
    assert len(named) > 100, "few files name any: the pattern finds nothing"
    dead = [name for name in named if not {name[1:3], name[1:4]} & known]
    assert dead == [], dead


def test_every_page_is_in_the_navigation_and_has_one_title() -> None:
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    named = re.findall(r"([\w/.-]+\.md)$", settings, re.MULTILINE)
    pages = [page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")]
    assert [page for page in pages if page not in named] == [], "name the page in mkdocs.yml, under nav"
    titles = {page: len(re.findall(r"^# ", text_of(page), re.MULTILINE)) for page in PAGES}
    assert {page: count for page, count in titles.items() if count != 1} == {}


def test_the_figures_of_the_readme_are_those_of_the_bench() -> None:
    rows = re.findall(r"\| ([\d,]+/s) \| ([\d,]+/s) \| \*\*([\d.]+)\*\* \|", (ROOT / "README.md").read_text("utf-8"))
    measured = (ROOT / "docs/reference/performance.md").read_text("utf-8")
    assert len(rows) == 3
    assert [row for row in rows if f"| {row[0]} | {row[1]} | **{row[2]}** |" not in measured] == []


def test_costs_of_the_readme_are_those_of_the_published_tables() -> None:
    """``python -m bench.neutral --write`` changes the tables alone."""
    page = (ROOT / "docs" / "reference" / "performance.md").read_text(encoding="utf-8")
    published = {}
    for name in ("neutral-compiled", "neutral"):
        table = page.partition(f"<!-- {name}:begin -->")[2].partition(f"<!-- {name}:end -->")[0]
        published[name] = next(line for line in table.splitlines() if line.startswith("| put-c100 |")).split(" | ")[6]
    told = re.search(
        r"takes ([\d.]+) of etcd's processor time \(interpreted: ([\d.]+)\)", (ROOT / "README.md").read_text("utf-8")
    )
    assert told is not None
    assert list(told.groups()) == list(published.values())


def test_the_readme_and_folders_stay_small() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= README_LINES_MAX
    folders = [path for path in (ROOT / "docs").rglob("*") if path.is_dir()]
    assert {
        folder.name: count for folder in folders if (count := len(list(folder.glob("*.md")))) > FOLDER_FILES_MAX
    } == {}
