"""House rules that a linter does not know: sizes of files and functions, words that must not appear."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILE_LINES_MAX = 700
FUNCTION_LINES_MAX = 70
LEFT_OVER = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
SLEEP = re.compile(r"\btime\.sleep\(")
OWN_NAME = "tests/test_tidy.py"


def _tracked(*patterns: str) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


SOURCES = _tracked("*.py")


TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in SOURCES}


@functools.cache
def _trees() -> dict[str, ast.Module]:
    """All sources, parsed; not at the import, which every process of a test run pays for."""
    return {name: ast.parse(text) for name, text in TEXTS.items()}


def test_files_stay_readable() -> None:
    long = {name: lines for name, text in TEXTS.items() if (lines := text.count("\n")) > FILE_LINES_MAX}
    assert not long


def test_nothing_is_left_for_later_and_nobody_sleeps() -> None:
    others = {name: text for name, text in TEXTS.items() if name != OWN_NAME}
    assert not [name for name, text in others.items() if LEFT_OVER.search(text)], (
        "finish it, or write it down elsewhere"
    )
    assert not [name for name, text in others.items() if SLEEP.search(text)], "wait for a condition"


def _long_functions(tree: ast.AST) -> list[str]:
    return [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= FUNCTION_LINES_MAX
    ]


def test_functions_stay_readable() -> None:
    assert not {name: long for name, tree in _trees().items() if (long := _long_functions(tree))}


def _imported(tree: ast.AST) -> set[str]:
    nodes = list(ast.walk(tree))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {
        name.split(".")[0]
        for name in plain | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    }


@pytest.mark.parametrize("module", ["pickle", "marshal", "shelve"])
def test_nothing_is_unpickled(module: str) -> None:
    assert not [name for name, tree in _trees().items() if name != OWN_NAME and module in _imported(tree)]


def test_safety_does_not_rest_on_assert() -> None:
    checked = [name for name in SOURCES if name.startswith(("raftkv/", "storage/")) and "/cli/" not in name]
    asserting = [name for name in checked if any(isinstance(node, ast.Assert) for node in ast.walk(_trees()[name]))]
    assert not asserting, "raise InvariantError: python -O drops asserts"
