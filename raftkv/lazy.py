"""Packages whose names are imported at their first use, so that a program loads only what it uses.

``attach`` does what ``lazy_loader.attach`` of Scientific Python (SPEC 1) does, for names that type checkers read from a
block ``if TYPE_CHECKING:`` beside the call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def attach(
    package: str, places: Mapping[str, str], modules: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package; names added to the last are shown too.

    Arguments:
        package: full name of the package.
        places: names by the module that defines them: paths below the package, names separated by blanks.
        modules: modules of the package that are public themselves.
    """
    path_of = {name: f"{package}.{place}" for place, names in places.items() for name in names.split()}
    public = sorted({*path_of, *modules})

    def load(name: str) -> Any:
        if name in modules:
            return import_module(f"{package}.{name}")
        if name not in path_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(path_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*public, *(name for name in vars(sys.modules[package]) if name.startswith("__"))})

    return load, list_names, public
