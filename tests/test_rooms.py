"""The layout of the sources: no circles of imports, a head on every package."""

from __future__ import annotations

import ast
import functools
from collections.abc import Container, Iterator, Mapping
from pathlib import Path

import pytest

from tests.test_layers import module_of, product_files, statements

HEAD_LINES_MIN = 5


def test_no_file_repeats_the_name_of_its_package() -> None:
    names = [path for path in product_files() if path.stem.startswith(f"{path.parent.name}_")]
    assert names == []


def test_every_package_has_a_head() -> None:
    heads = {path: ast.get_docstring(ast.parse(path.read_text())) or "" for path in product_files() if _is_head(path)}
    short = [str(path.parent) for path, head in heads.items() if head.count("\n") + 1 < HEAD_LINES_MIN]
    assert short == []


def _is_head(path: Path) -> bool:
    return path.name == "__init__.py" and path.parent.name != "pb"


@functools.cache
def _graph() -> dict[str, set[str]]:
    """Map each module of the product to the modules that it imports at import time."""
    paths = {module_of(path): path for path in product_files() if "pb" not in path.parts}
    return {
        name: {found for found in _at_import(path, paths) if found in paths} - {name} for name, path in paths.items()
    }


def _at_import(path: Path, known: Container[str]) -> Iterator[str]:
    for one in statements(path):
        if one.is_at_import:
            submodules = [name for name in one.names if f"{one.module}.{name}" in known]
            yield from (f"{one.module}.{name}" for name in submodules)
            if len(submodules) < len(one.names) or not one.names:
                yield one.module


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the groups of two or more nodes that reach each other (Tarjan's strongly connected components)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    open_nodes: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        open_nodes.append(node)
        for target in graph.get(node, ()):
            if target not in order:
                visit(target)
                lowest[node] = min(lowest[node], lowest[target])
            elif target in open_nodes:
                lowest[node] = min(lowest[node], order[target])
        if lowest[node] == order[node]:
            at = open_nodes.index(node)
            if len(group := sorted(open_nodes[at:])) > 1:
                found.append(group)
            del open_nodes[at:]

    for node in graph:
        if node not in order:
            visit(node)
    return found


def test_no_modules_import_each_other() -> None:
    assert circles(_graph()) == []


@pytest.mark.parametrize("part", ["replica", "server", "client", "rpc", "training", "cli", "storage", "torch"])
def test_no_rooms_of_a_part_import_each_other(part: str) -> None:
    prefix = f"raftkv.{part}."
    rooms: dict[str, set[str]] = {}
    for module, targets in _graph().items():
        if module.startswith(prefix):
            own = _room(module, prefix)
            theirs = {_room(target, prefix) for target in targets if target.startswith(prefix)}
            rooms.setdefault(own, set()).update(theirs - {own})
    assert circles(rooms) == []


def _room(module: str, prefix: str) -> str:
    """Return the package that a module belongs to; a module beside the packages is its own package."""
    return module.removeprefix(prefix).split(".")[0]


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
