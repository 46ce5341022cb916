"""Marks all but a few cases of a test as `long`, so that `make test` still runs some of each kind.

@pytest.mark.parametrize("first", long_except(range(1, 501, 10), range(100)))
@pytest.mark.parametrize(("members", "steps"), long_except([(3, 8_000), (1, 500)], [(1, 500)]))
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy


def long_except(cases: Iterable[Any], short: Container[Any]) -> list[Any]:
    """Return `cases` for `parametrize`, marked unless they are in `short`; a tuple is several arguments."""
    return [case if case in short else pytest.param(*_arguments(case), marks=pytest.mark.long) for case in cases]


def _arguments(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)


def property_of(strategy: SearchStrategy[Any], *, short: int, long: int) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator that makes two cases of a property: with `short` examples, and marked, with `long` ones."""

    def decorate(check: Callable[..., None]) -> Any:
        @pytest.mark.parametrize("examples", long_except((short, long), (short,)))
        def test(examples: int) -> None:
            settings(max_examples=examples)(given(strategy)(check))()

        return test

    return decorate
