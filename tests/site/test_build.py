"""The site as it is built: strict, quiet, without a request elsewhere, each link and anchor in it leads somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.site.test_links import ROOT

TIMEOUT_S = 300
FETCHING = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("source", "src")}


class Page(HTMLParser):
    """What a page links to, what it has the browser fetch, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.fetched: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if (tag, name) in FETCHING:
                self.fetched.add(value or "")
            elif (tag, name) == ("a", "href"):
                self.links.add(value or "")
            elif name in ("id", "name"):
                self.anchors.add(value or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    # Not --quiet: then warnings are not counted, and --strict has nothing to fail for.
    lines = (done.stdout + done.stderr).splitlines()
    assert (done.returncode, [line for line in lines if not line.startswith("INFO ")]) == (0, []), done.stderr
    return target


@pytest.mark.long
def test_the_site_builds_and_everything_in_it_leads_somewhere(site: Path) -> None:
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) > 60
    missing = []
    for path, page in pages.items():
        assert [url for url in page.fetched if re.match("(https?:)?//", url)] == [], path
        for link in page.links | page.fetched:
            if re.match(r"(https?|mailto|data|javascript):", link):
                continue
            name, _, anchor = link.partition("#")
            target = (path.parent / unquote(name)).resolve() if name else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or (anchor and target in pages and unquote(anchor) not in pages[target].anchors):
                missing.append(f"{path.relative_to(site)}: {link}")
    assert missing == []
    shown = (site / "reference" / "python" / "client.html").read_text(encoding="utf-8")
    assert all(f'id="raftkv.Client.{name}"' in shown for name in ("put", "range", "stm", "quotas")), (
        "see docsite/api.py"
    )
