"""An extension of griffe, which reads the sources for mkdocstrings: methods that the blocking client is made of.

``put = taskless(KV.put)`` in ``Client`` is a method of the client with the signature and the docstring of ``KV.put``,
which griffe sees as an attribute without either. Here it becomes a method, without ``async``. And a line ``key, end:
what they are`` of a docstring becomes one for each.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import griffe

ASYNC_MAKERS = {"staticmethod"}
BLOCKING_MAKERS = {"_connector", "blocking", "taskless", "chunked", "iterating", "taking"}


SHARED = re.compile(r"^(?P<indent> {4,})(?P<names>\w+(?:, \w+)+): (?P<text>.*)$", re.MULTILINE)


class TakenOver(griffe.Extension):
    """Turns such attributes into functions, once a whole package is loaded, and such lines into several."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Write a line of a docstring once for each name that it is about."""
        if obj.docstring:
            obj.docstring.value = SHARED.sub(_each, obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        """Replace them in all modules and classes of the package."""
        functions: dict[str, griffe.Function] = {}
        for owner in list(_owners(pkg)):
            for name, member in list(owner.members.items()):
                if isinstance(member, griffe.Attribute) and (function := _made_of(member, pkg, loader)):
                    function.name, function.parent = name, owner
                    owner.members[name] = functions[member.path] = function
        for owner in list(_owners(pkg)):  # names that were imported before they became functions
            for name, member in list(owner.members.items()):
                if isinstance(member, griffe.Alias) and member.target_path in functions:
                    owner.members[name] = griffe.Alias(name, functions[member.target_path], parent=owner)


def _each(found: re.Match[str]) -> str:
    lines = [f"{found['indent']}{name}: {found['text']}" for name in found["names"].split(", ")]
    return "\n".join(lines)


def _owners(module: griffe.Module) -> Iterator[griffe.Class | griffe.Module]:
    """Go through the modules and classes of a package."""
    yield module
    for member in module.members.values():
        if isinstance(member, griffe.Class):
            yield member
        elif isinstance(member, griffe.Module):
            yield from _owners(member)


def _made_of(member: griffe.Attribute, pkg: griffe.Module, loader: griffe.GriffeLoader) -> griffe.Function | None:
    """Return a copy of the function that an attribute is made of; None if it is none."""
    call = member.value
    if not isinstance(call, griffe.ExprCall):
        return None
    maker = str(call.function).rpartition(".")[2]
    paths = [found.canonical_path for found in call.arguments if isinstance(found, griffe.Expr)]
    if maker not in ASYNC_MAKERS | BLOCKING_MAKERS:
        return None
    for path in paths:
        if not path.startswith(f"{pkg.name}."):
            continue
        found = loader.modules_collection[path]
        target = found.final_target if isinstance(found, griffe.Alias) else found
        if isinstance(target, griffe.Function):
            function = copy.copy(target)
            function.labels = target.labels - {"async"} if maker in BLOCKING_MAKERS else set(target.labels)
            return function
    return None
