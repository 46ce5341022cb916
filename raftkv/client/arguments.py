"""Arguments of callers, checked before anything is begun with them: a wrong one must not reach what many calls share.

>>> seconds(2.5, "timeout_s")
2.5
>>> whole(True, "limit")
Traceback (most recent call last):
TypeError: limit is a whole number, not True
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import Any, TypeVar

T = TypeVar("T")


def seconds(value: Any, name: str) -> float:
    """Return a finite number of seconds.

    Arguments:
        value: as the caller gave it.
        name: of the argument.

    Raises:
        TypeError: it is no number.
        ValueError: it is infinite, or not a number.
    """
    if not isinstance(value, int | float | Real):
        raise TypeError(f"{name} is a number of seconds, not {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} is a finite number of seconds, not {value}")
    return value if isinstance(value, int | float) else float(value)


def limit(value: Any, name: str) -> float | None:
    """Return the limit of a wait that may be without one; None: it is, as is an infinite one.

    Arguments:
        value: as the caller gave it.
        name: of the argument.

    Raises:
        TypeError: it is neither a number nor None.
        ValueError: it is no number of seconds.
    """
    return None if value is None or value == math.inf else seconds(value, name)


def whole(value: Any, name: str) -> int:
    """Return a whole number.

    Arguments:
        value: as the caller gave it.
        name: of the argument.

    Raises:
        TypeError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} is a whole number, not {value!r}")
    return int(value)


def text(value: Any, name: str) -> str:
    """Return a text.

    Arguments:
        value: as the caller gave it.
        name: of the argument.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(value, str):
        raise TypeError(f"{name} is a text, not {value!r}")
    return value


def instance(value: Any, kind: type[T], name: str) -> T:
    """Return an object of a kind.

    Arguments:
        value: as the caller gave it.
        kind: its class.
        name: of the argument.

    Raises:
        TypeError: it is another one.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{name} is a {kind.__name__}, not {value!r}")
    return value


def path(value: Any, name: str) -> str:
    """Return a path, or a URL, as a text; a ``pathlib.Path`` is one too.

    Arguments:
        value: as the caller gave it.
        name: of the argument.

    Raises:
        TypeError: it is none.
    """
    given = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(given, str):
        raise TypeError(f"{name} is a path, not {value!r}")
    return given


def function(value: Callable[..., T], name: str) -> Callable[..., T]:
    """Return what can be called.

    Arguments:
        value: as the caller gave it.
        name: of the argument.

    Raises:
        TypeError: it cannot be called.
    """
    if not callable(value):
        raise TypeError(f"{name} is a function, not {value!r}")
    return value


def many(items: Iterable[T], method: str) -> Iterable[T]:
    """Return several items; text and bytes are one, and not its letters.

    Arguments:
        items: as the caller gave them.
        method: whose argument they are.

    Raises:
        TypeError: it is one key, or nothing that holds several.
    """
    if isinstance(items, str | bytes | bytearray | memoryview) or not isinstance(items, Iterable):
        raise TypeError(f"{method}() takes several, as in a list, not {items!r}")
    return items
