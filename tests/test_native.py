"""The native build keeps rules that mypyc checks only when an object is created, and is as new as its sources."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

import raftkv.native
from requirements import native

ROOT = Path(__file__).resolve().parents[1]
Class = tuple[str, str]
"""A module and a name in it."""


def module_of(path: Path) -> str:
    """Return the dotted name of a file; storage/ is raftkv.storage."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = ("raftkv", *parts) if parts[0] == "storage" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = {module_of(path): path for folder in ("raftkv", "storage", "tests") for path in (ROOT / folder).rglob("*.py")}
GROUPS = {native.GROUP: native.TOGETHER, **native.APART}
COMPILED = {module_of(ROOT / name): group for group, names in GROUPS.items() for name in names}
"""Modules, and the library that each is in."""


EXTENDS = re.compile(r"^\s*class \w+(\[[^(]*)?\(", re.MULTILINE)
"""What the text of a module has that has a class with a base."""


def text_of(module: str) -> str:
    return PATHS[module].read_text(encoding="utf-8")


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(text_of(module))


@cache
def imports_of(module: str) -> dict[str, Class]:
    """Return the bindings of `from X import y as z`, inside functions too."""
    package = module if PATHS[module].name == "__init__.py" else module.rpartition(".")[0]
    found = {}
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.ImportFrom):
            parent = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*parent, *filter(None, [node.module])])
            found |= {alias.asname or alias.name: (source, alias.name) for alias in node.names}
    return found


@cache
def classes_of(module: str) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.walk(tree_of(module)) if isinstance(node, ast.ClassDef)}


def home_of(module: str, name: str) -> Class | None:
    """Return the module and name of the class that a module refers to by a name; None: not in this repository."""
    while module in PATHS:
        if name in classes_of(module):
            return module, name
        if name not in imports_of(module):
            # `module.Class`, with the module imported by its name, is no base that is in use.
            return None
        module, name = imports_of(module)[name]
    return None


def bases_of(module: str) -> Iterator[tuple[ast.ClassDef, Class]]:
    """Yield each class of a module with each of its bases that are defined in this repository."""
    for node in classes_of(module).values():
        for base in node.bases:
            plain = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(plain, ast.Attribute) and isinstance(plain.value, ast.Name):
                source = imports_of(module).get(plain.value.id)
                found = home_of(".".join(source), plain.attr) if source else None
            else:
                found = home_of(module, plain.id) if isinstance(plain, ast.Name) else None
            if found is not None:
                yield node, found


def is_protocol(base: Class) -> bool:
    """Tell whether a class is a protocol, which has no instances."""
    return any(ast.unparse(each).startswith("Protocol") for each in classes_of(base[0])[base[1]].bases)


def are_compiled_together(module: str, other: str) -> bool:
    return module in COMPILED and COMPILED[module] == COMPILED.get(other)


def is_open(base: Class) -> bool:
    """Tell whether an interpreted class may extend a compiled one."""
    decorators = classes_of(base[0])[base[1]].decorator_list
    return is_protocol(base) or "allow_interpreted_subclasses=True" in "".join(map(ast.unparse, decorators))


def test_the_list_names_modules_once() -> None:
    assert len(set(native.MODULES)) == len(native.MODULES)
    assert [name for name in native.MODULES if not (ROOT / name).is_file()] == []


@pytest.mark.long
def test_classes_extended_from_outside_allow_it() -> None:
    closed = [
        f"{module}.{node.name} extends {'.'.join(base)}"
        for module in PATHS
        if EXTENDS.search(text_of(module))
        for node, base in bases_of(module)
        if base[0] in COMPILED
        and not is_open(base)
        and base[0] != module
        and not are_compiled_together(base[0], module)
    ]
    assert closed == []


def test_bases_of_compiled_classes_are_compiled() -> None:
    outside = [
        f"{module}.{node.name} extends {'.'.join(base)}"
        for module in COMPILED
        for node, base in bases_of(module)
        if base[0] != module
        and not are_compiled_together(base[0], module)
        and not is_protocol(base)
        and not node.name.endswith("Error")
    ]
    assert outside == []


def test_no_generator_expression_of_a_compiled_module_is_endless() -> None:
    """Compiled, such a generator would become an endless list: its first use would not return."""
    nodes = [(module, node) for module in sorted(COMPILED) for node in ast.walk(tree_of(module))]
    expressions = [(module, node) for module, node in nodes if isinstance(node, ast.GeneratorExp)]
    sources = [(module, ast.unparse(part.iter)) for module, node in expressions for part in node.generators]
    assert [one for one in sources if any(f"{name}(" in one[1] for name in ("count", "repeat", "cycle"))] == []


@pytest.mark.parametrize(
    ("value", "places"),
    [
        ("((ApplyingObject *)cpy_r_self)->__under_way", ['"applying.py", "_run", 230, globals']),
        ("PyObject_Vectorcall(cpy_r_r5, cpy_r_r7, 1, 0)", []),
    ],
    ids=["attribute", "result of a call"],
)
def test_an_attribute_that_the_c_asserts_to_be_none_is_found(value: str, places: list[str]) -> None:
    lines = (
        f"    cpy_r_r9 = {value};",
        '    CPy_TypeError("None", cpy_r_r9); cpy_r_r10 = 2;',
        '    CPy_AddTraceback("applying.py", "_run", 230, globals);',
    )
    assert native.asserted_none("\n".join(lines)) == places


def imported_by(module: str) -> Iterator[str]:
    """Yield all modules that a module imports, inside functions too: mypy reads all of them."""
    package = module if PATHS[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*parent, *filter(None, [node.module])])
            inside = [name for alias in node.names if (name := f"{source}.{alias.name}") in PATHS]
            yield from (inside or [source])


def needed_by(package: str) -> Iterator[str]:
    """Yield the dependencies of a package on any machine."""
    for text in metadata.requires(package) or []:
        if "extra ==" not in text:
            yield re.split(r"[^A-Za-z0-9_.-]", text, maxsplit=1)[0]


@pytest.mark.long
def test_build_imports_only_declared_dependencies() -> None:
    """A development environment has everything installed, which hides imports that break users' builds."""
    seen: set[str] = set()
    todo, outside = list(COMPILED), set()
    while todo:
        if (module := todo.pop()) in seen:
            continue
        seen.add(module)
        if module in PATHS:
            parts = module.split(".")
            todo += [".".join(parts[:end]) for end in range(1, len(parts))]
            todo += imported_by(module)
        elif module.partition(".")[0] not in {*sys.stdlib_module_names, "raftkv", "tests"}:
            outside.add(module)
    setup = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    (install,) = (
        ast.literal_eval(node.value)
        for node in setup.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "INSTALL"
    )
    packages = {re.split(r"[^A-Za-z0-9_.-]", text, maxsplit=1)[0] for text in install}
    packages |= {name for package in sorted(packages) for name in needed_by(package)}
    installed = {name.lower().replace("_", "-") for name in packages}
    owners = metadata.packages_distributions()
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    overrides = [one for one in config["tool"]["mypy"]["overrides"] if one.get("ignore_missing_imports")]
    ignored = {name.removesuffix(".*") for one in overrides for name in one["module"]}

    def is_there(module: str) -> bool:
        top = module.partition(".")[0]
        return top in ignored or any(each.lower().replace("_", "-") in installed for each in owners.get(top, []))

    assert "opentelemetry.trace" in outside, "the walk has ended early"
    assert sorted(module for module in outside if not is_there(module)) == []


def test_a_build_without_a_compiler_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    with pytest.raises(SystemExit, match="needs a C compiler, and no-such-compiler is not found"):
        native.extensions()
    monkeypatch.setenv("CC", "false -m64")
    with pytest.raises(SystemExit, match="needs a C compiler, and false compiles nothing: exit status 1 "):
        native.extensions()
    monkeypatch.setenv("CC", "cc")
    assert "compiler" not in native.missing()


def test_libraries_are_all_there_and_as_new_as_their_sources_or_none_is() -> None:
    there = [at.exists() for at in native.libraries()]
    assert all(there) or not any(there), "make native, or make interpreted"
    assert native.stale() == [], "make native, or make interpreted"
    assert raftkv.native.is_compiled() == all(there)


def test_names_in_the_database_have_types_that_need_no_inference() -> None:
    """With only the compiler installed, the order of a circular import left a name without a type: no build."""
    assert re.findall(r"^\w+: Final = b", text_of("raftkv.storage.schema"), re.MULTILINE) == []
