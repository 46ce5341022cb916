"""House rules that a linter does not know: sizes of functions, words that must not appear."""

from __future__ import annotations

import ast
import functools
import gc
import re
import subprocess
from collections import deque
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
FUNCTION_LINES_MAX = 70
LEFT_OVER = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
WORDS_GONE = re.compile(
    r"\b(succession|permits|errands?|reigns?|doomed|tellers?|tenanc(y|ies)|judges|judged|(is|are) told)\b",
    re.IGNORECASE,
)
"""Words that stood for what the field calls something else; ARCHITECTURE.md has the glossary."""
SLEEP = re.compile(r"\btime\.sleep\(")
OWN_NAME = "tests/test_tidy.py"


def _tracked(*patterns: str) -> list[str]:
    """List tracked files. Patterns that begin with ``-`` are options of ``git ls-files``."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


@functools.cache
def _texts() -> dict[str, str]:
    """Return all sources, read at first use: every process of a test run imports this module."""
    return {name: (ROOT / name).read_text(encoding="utf-8") for name in _tracked("*.py")}


class Facts(NamedTuple):
    """Facts about a source; its tree is dropped, because so many objects would slow every garbage collection."""

    long_functions: list[str]
    imported: set[str]
    asserts: bool


@functools.cache
def _facts() -> dict[str, Facts]:
    gc.disable()
    try:
        return {name: _facts_of(ast.parse(text)) for name, text in _texts().items()}
    finally:
        gc.enable()


def _facts_of(tree: ast.Module) -> Facts:
    facts, left = Facts([], set(), False), deque[ast.AST]([tree])
    while left:
        node = left.popleft()
        left.extend(child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if (node.end_lineno or 0) - node.lineno >= FUNCTION_LINES_MAX:
                facts.long_functions.append(node.name)
        elif isinstance(node, ast.Import):
            facts.imported.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            facts.imported.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Assert):
            facts = facts._replace(asserts=True)
    return facts


def test_nothing_is_left_for_later_and_no_task_sleeps() -> None:
    others = {name: text for name, text in _texts().items() if name != OWN_NAME}
    assert not [name for name, text in others.items() if LEFT_OVER.search(text)], (
        "finish it, or write it down elsewhere"
    )
    assert not [name for name, text in others.items() if SLEEP.search(text)], "wait for a condition"


def test_no_ignored_file_is_tracked() -> None:
    assert _tracked("--cached", "--ignored", "--exclude-standard") == [], "a tool's own files: git rm --cached"


def test_functions_stay_readable() -> None:
    assert not {name: facts.long_functions for name, facts in _facts().items() if facts.long_functions}


@pytest.mark.parametrize("module", ["pickle", "marshal", "shelve"])
def test_nothing_is_unpickled(module: str) -> None:
    # The reader takes the types of an allow-list; the tests play what other people's programs do.
    own = {OWN_NAME, "tests/test_errors.py", "tests/client/test_login.py", "tests/torch/checkpoint/test_single_rank.py"}
    own.add("raftkv/torch/checkpoint/reader.py")
    assert not [name for name, facts in _facts().items() if name not in own and module in facts.imported]


def test_safety_does_not_rest_on_assert() -> None:
    checked = [name for name in _texts() if name.startswith(("raftkv/", "storage/")) and "/cli/" not in name]
    asserting = [name for name in checked if _facts()[name].asserts]
    assert not asserting, "raise InvariantError: python -O drops asserts"


def test_things_have_the_names_of_the_field() -> None:
    pages = {name: (ROOT / name).read_text(encoding="utf-8") for name in _tracked("*.md") if name != "CHANGELOG.md"}
    found = {name: match[0] for name, text in (_texts() | pages).items() if (match := WORDS_GONE.search(text))}
    found.pop(OWN_NAME)
    assert found == {}
