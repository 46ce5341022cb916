"""Hooks of mkdocs: files outside ``docs/`` that pages link to are pages of the site too.

A page links to ``../../examples/quickstart.py`` or ``../../ARCHITECTURE.md``, which a reader of the checkout can
follow. In the site such a link leads to a page with the text of that file. README is the site's home page.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docsite.commands import filled

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("ARCHITECTURE.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md")
"""Pages of the repository's top folder; the site has them among those for contributors."""
LINK = re.compile(r"\]\((?P<path>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".yml": "yaml", ".yaml": "yaml", ".json": "json", ".sh": "bash"}


def place(path: str) -> str:
    """Return where a file of the repository lies in the site's sources: `path` begins at the repository's top."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path == "README.md":
        return "index.md"
    if path in DOCUMENTS:
        return f"contributing/{path}"
    return f"files/{path}.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that pages link to."""
    pages = {file.src_uri: file.content_string for file in files.documentation_pages()}
    pages |= {place(name): (ROOT / name).read_text(encoding="utf-8") for name in DOCUMENTS}
    linked = {target for uri, text in pages.items() for target in _outside(uri, text)}
    for path in sorted({*linked, *DOCUMENTS} - {"README.md"}):
        text = (ROOT / path).read_text(encoding="utf-8")
        if not path.endswith(".md"):
            text = f"# {path}\n\n```{LANGUAGES.get(Path(path).suffix, 'text')}\n{text}\n```\n"
        files.append(File.generated(config, place(path), content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to files outside ``docs/`` to their pages."""

    def replaced(found: re.Match[str]) -> str:
        target = _target(page.file.src_uri, found["path"])
        if target is None:
            return found[0]
        leads = os.path.relpath(place(target), os.path.dirname(page.file.src_uri))
        return f"]({leads}{found['anchor'] or ''})"

    return LINK.sub(replaced, filled(markdown))


def on_post_build(config: MkDocsConfig) -> None:
    """Write the index of the search as a script too: pages that are opened as files may not fetch it."""
    index = Path(config.site_dir) / "search" / "search_index.json"
    index.with_suffix(".js").write_text(f"var __index = {index.read_text(encoding='utf-8')}", encoding="utf-8")


def _outside(uri: str, text: str) -> set[str]:
    """Return the files outside ``docs/`` that a page links to."""
    found = {target for link in LINK.finditer(text) if (target := _target(uri, link["path"]))}
    return {target for target in found if not target.startswith("docs/")}


def _target(uri: str, link: str) -> str | None:
    """Return what a link leads to, from the repository's top; None for what mkdocs finds, or misses, by itself."""
    origin = next((name for name in DOCUMENTS if place(name) == uri), f"docs/{uri}")
    path = os.path.normpath(os.path.join(os.path.dirname(origin), link))
    if not (ROOT / path).is_file() or (path.startswith("docs/") and origin.startswith("docs/")):
        return None
    return path
