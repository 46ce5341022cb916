"""The import arrows of ARCHITECTURE.md, held by walking the sources."""

from __future__ import annotations

import ast
import functools
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "lazy": set(),
    "suspend_clock": set(),
    "pb": set(),
    "urls": {"errors"},
    "cluster_id": {"errors", "urls"},
    "config": {"errors", "cluster_id", "urls"},
    "raft": set(),
    "native": {"raft"},
    "ui": set(),
    "histograms": set(),
    "loop": {"histograms"},
    "rpc": {"loop", "lazy"},
    "storage": {"raft", "pb", "errors"},
    "apply": {"storage", "raft", "pb", "errors", "cluster_id"},
    "offline": {"apply", "storage", "raft", "pb", "errors", "config", "cluster_id"},
    "replica": {
        "apply", "storage", "raft", "rpc", "loop", "histograms", "pb", "errors", "config", "cluster_id",
        "suspend_clock",
    },
    "server": {
        "offline", "replica", "apply", "storage", "raft", "rpc", "loop", "histograms", "pb", "errors", "config",
        "cluster_id", "native", "suspend_clock",
    },
    "client": {"rpc", "loop", "pb", "errors", "suspend_clock", "urls"},
    "aio": {"client", "errors"},
    "grpcio": {"client", "pb", "errors"},
    "pytest_plugin": {"client", "errors"},
    "checkpoint": {"client", "loop", "pb", "errors", "lazy"},
    "dataset": {"client", "loop", "pb", "errors", "lazy"},
    "training": {"checkpoint", "client", "aio", "loop", "rpc", "pb", "errors", "lazy", "urls"},
    "jax": {"checkpoint", "client", "training", "errors", "urls"},
    "torch": {"checkpoint", "dataset", "integrations", "training", "client", "aio", "pb", "errors", "lazy", "urls"},
    "integrations": {"checkpoint", "client", "training", "rpc", "pb", "errors", "urls"},
    "cli": {
        "client", "loop", "replica", "server", "offline", "rpc", "pb", "errors", "config", "cluster_id", "urls",
        "training", "integrations", "checkpoint", "dataset", "native",
    },
}  # fmt: skip
"""Each package or module of ``raftkv`` and what of ``raftkv`` it may import, besides itself."""

RAFT_STDLIB = {
    "__future__", "abc", "bisect", "collections", "collections.abc", "dataclasses", "enum", "heapq", "itertools",
    "math", "mypy_extensions", "operator", "random", "struct", "typing",
}  # fmt: skip
"""What the pure core may import: nothing with a clock, a file or a socket."""


def sources(folder: str) -> list[Path]:
    """Return the Python files of a folder, except files that other tests create and delete (``jepsen/runs``)."""
    found = []
    for parent, folders, files in os.walk(ROOT / folder):
        folders[:] = [name for name in folders if name not in ("runs", "__pycache__")]
        found += [Path(parent) / name for name in files if name.endswith(".py")]
    return sorted(found)


@dataclass(frozen=True)
class Import:
    """An import statement: the module, the imported names, and whether it runs when the file is imported."""

    module: str
    names: list[str]
    is_at_import: bool


@functools.cache
def statements(path: Path) -> list[Import]:
    """Return the imports of a file, inside functions too."""
    package = module_of(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    found = []

    def visit(node: ast.AST, is_at_import: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, [], is_at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found.append(Import(module, [alias.name for alias in node.names], is_at_import))
        elif not isinstance(node, ast.expr):
            later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or (
                isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            )
            for child in ast.iter_child_nodes(node):
                visit(child, is_at_import and not later)

    visit(ast.parse(path.read_text(encoding="utf-8")), True)
    return found


def _imports(path: Path) -> list[str]:
    """Return the absolute names of all modules that a file imports, inside functions too."""
    found = []
    for one in statements(path):
        found.append(one.module)
        if one.module == "raftkv":
            found += [f"raftkv.{name}" for name in one.names]
    return found


def module_of(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "storage":
        parts.insert(0, "raftkv")
    return ".".join(part for part in parts if part != "__init__")


def _part(module: str) -> str:
    return module.split(".")[1] if module.count(".") else ""


def product_files() -> list[Path]:
    linked = ROOT / "raftkv" / "storage"
    return [path for path in sources("raftkv") if linked not in path.parents] + sources("storage")


def test_the_storage_link_is_relative_and_shows_the_top_folder() -> None:
    link = ROOT / "raftkv" / "storage"
    assert link.is_symlink()
    assert str(link.readlink()) == "../storage"


def _against_the_arrows(path: Path) -> set[str]:
    own = _part(module_of(path))
    if own in ("", "__main__"):
        return set()  # the package itself and ``python -m raftkv`` only name what is below
    parts = {_part(name) for name in _imports(path) if name.startswith("raftkv.")}
    return parts - ALLOWED[own] - {own, "__version__"}


def test_imports_follow_the_arrows() -> None:
    offenders = {module_of(path): wrong for path in product_files() if (wrong := _against_the_arrows(path))}
    assert not offenders


def test_the_check_of_the_arrows_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    wrong = tmp_path / "raftkv" / "raft" / "wrong.py"
    wrong.parent.mkdir(parents=True)
    wrong.write_text("from ..server import node\nfrom raftkv.storage import wal\nimport raftkv.errors\n")
    assert _against_the_arrows(wrong) == {"server", "storage", "errors"}


def test_nothing_imports_the_tests() -> None:
    for path in product_files() + sources("jepsen"):
        tops = {name.split(".")[0] for name in _imports(path)}
        assert "tests" not in tops, path
        assert "storage" not in tops, f"{path}: the package is raftkv.storage"
        assert "jepsen" not in tops or path.is_relative_to(ROOT / "jepsen"), path


def test_the_core_is_pure() -> None:
    for path in sources("raftkv/raft"):
        foreign = {name for name in _imports(path) if not name.startswith("raftkv.raft")}
        assert foreign <= RAFT_STDLIB, path


def test_the_replica_has_no_sockets() -> None:
    """The replica sends through its devices only; it may import ``Channel`` and calls as their types."""
    allowed = {"client.calls", "client.channel", "framing", "server.calls", "server.stream", "shares", "status", "uses"}
    for path in sources("raftkv/replica"):
        imported = {name.removeprefix("raftkv.rpc.") for name in _imports(path) if name.startswith("raftkv.rpc")}
        assert imported <= allowed, path
        assert not {"socket", "ssl", "http"} & {name.split(".")[0] for name in _imports(path)}, path


def test_no_library_speaks_http2_for_the_product() -> None:
    """Other HTTP/2 libraries may only be used as oracles in tests."""
    libraries = {"ngh2", "h2", "hpack", "hyperframe"}
    users = {module_of(path) for path in product_files() if libraries & {name.split(".")[0] for name in _imports(path)}}
    assert users == set()


def test_jepsen_talks_over_the_wire_only() -> None:
    parts = {_part(name) for path in sources("jepsen") for name in _imports(path) if name.startswith("raftkv.")}
    assert parts <= {"pb"}
