"""Checks of arguments before a call starts, so that a wrong one never reaches state shared by many calls.

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
        value: value from the caller.
        name: name of the argument.

    Raises:
        TypeError: the value is not a number.
        ValueError: the value is infinite or NaN.
    """
    if not isinstance(value, int | float | Real):
        raise TypeError(f"{name} is a number of seconds, not {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} is a finite number of seconds, not {value}")
    return value if isinstance(value, int | float) else float(value)


def limit(value: Any, name: str) -> float | None:
    """Return a time limit in seconds; None and infinity mean no limit, and return None.

    Arguments:
        value: value from the caller.
        name: name of the argument.

    Raises:
        TypeError: the value is neither a number nor None.
        ValueError: the value is NaN.
    """
    return None if value is None or value == math.inf else seconds(value, name)


def whole(value: Any, name: str) -> int:
    """Return a whole number.

    Arguments:
        value: value from the caller.
        name: name of the argument.

    Raises:
        TypeError: the value is not a whole number.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} is a whole number, not {value!r}")
    return int(value)


def text(value: Any, name: str) -> str:
    """Return a string.

    Arguments:
        value: value from the caller.
        name: name of the argument.

    Raises:
        TypeError: the value is not a string.
    """
    if not isinstance(value, str):
        raise TypeError(f"{name} is a text, not {value!r}")
    return value


def instance(value: Any, kind: type[T], name: str) -> T:
    """Return an instance of a class.

    Arguments:
        value: value from the caller.
        kind: expected class.
        name: name of the argument.

    Raises:
        TypeError: the value is not an instance of the class.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{name} is a {kind.__name__}, not {value!r}")
    return value


def path(value: Any, name: str) -> str:
    """Return a path or a URL as a string; also accepts a ``pathlib.Path``.

    Arguments:
        value: value from the caller.
        name: name of the argument.

    Raises:
        TypeError: the value is not a path.
    """
    given = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(given, str):
        raise TypeError(f"{name} is a path, not {value!r}")
    return given


def function(value: Callable[..., T], name: str) -> Callable[..., T]:
    """Return a callable.

    Arguments:
        value: value from the caller.
        name: name of the argument.

    Raises:
        TypeError: the value is not callable.
    """
    if not callable(value):
        raise TypeError(f"{name} is a function, not {value!r}")
    return value


def many(items: Iterable[T], method: str) -> Iterable[T]:
    """Return an iterable of items; refuse a string or bytes, which would be iterated letter by letter.

    Arguments:
        items: items from the caller.
        method: name of the method that takes the items.

    Raises:
        TypeError: the value is a single key, or not iterable.
    """
    if isinstance(items, str | bytes | bytearray | memoryview) or not isinstance(items, Iterable):
        raise TypeError(f"{method}() takes several, as in a list, not {items!r}")
    return items
