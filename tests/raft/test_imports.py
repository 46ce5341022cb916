"""The core imports only itself and a few modules without I/O, clock or randomness (house rule 1)."""

from __future__ import annotations

import ast
from pathlib import Path

import raftkv.raft

ALLOWED = {"__future__", "abc", "bisect", "collections", "dataclasses", "enum", "math", "mypy_extensions", "typing"}
# The random number generator is injected; its type is all that is needed.
ALLOWED_FOR_TYPES = {"random"}
SOURCES = sorted(Path(raftkv.raft.__file__).parent.glob("**/*.py"))


def _foreign(source: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.ImportFrom) and node.level > 1:
            names.add("." * node.level + (node.module or ""))
    return names - ALLOWED - ALLOWED_FOR_TYPES


def test_the_core_imports_only_itself() -> None:
    assert SOURCES
    assert {path.name: _foreign(path.read_text()) for path in SOURCES if _foreign(path.read_text())} == {}


def test_chance_is_only_a_type() -> None:
    for path in SOURCES:
        uses = [
            node.attr
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random"
        ]
        assert set(uses) <= {"Random"}, path.name


def test_the_test_sees_foreign_imports() -> None:
    assert _foreign("import time\nfrom raftkv import errors\nfrom .. import server\nfrom . import log") == {
        "time",
        "raftkv",
        "..",
    }
