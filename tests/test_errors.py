"""Errors survive pickling between processes."""

from __future__ import annotations

import asyncio
import copy
import errno
from typing import Any

import pytest

from raftkv.checkpoint.errors import DigestMismatch, FenceBroken, RanksMissing
from raftkv.errors import ConfigError, NoLeaderError, RaftKVError, StorageError, explain
from raftkv.training import BarrierTimeout, GenerationOver, RunClosed

ERRORS = [
    FenceBroken("job", 7), RanksMissing("step 1", 2.0, [3, 4]), DigestMismatch("step 1", "a.bin", "is missing"),
    GenerationOver("job", 7, "host gone"), BarrierTimeout("barrier", 1.0, [1]), RunClosed("job", "done"),
    ConfigError("no"), NoLeaderError(),
]  # fmt: skip


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_can_be_made_again_from_their_parts(error: RaftKVError) -> None:
    """Collectives of torch hand a rank's error to the others: one that cannot be read there leaves them waiting."""
    again = copy.copy(error)  # which takes the way of pickle
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def _raised(error: BaseException) -> BaseException:
    """Return it as one that raftkv has raised."""
    code = compile("def fail(error):\n    raise error\n", "some.py", "exec")
    module: dict[str, Any] = {"__name__": "raftkv.some"}
    exec(code, module)  # a function of a module of raftkv, whose line is known
    try:
        module["fail"](error)
    except BaseException as raised:
        return raised
    raise AssertionError(error)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), "out of memory (MemoryError, in raftkv.some line 2)"),
        (KeyError("x"), "KeyError: 'x', in raftkv.some line 2"),
        (TimeoutError(), "TimeoutError, in raftkv.some line 2"),
        (asyncio.CancelledError(), "CancelledError, in raftkv.some line 2"),
        (AssertionError(), "AssertionError, in raftkv.some line 2"),
        (ExceptionGroup("both", [AssertionError()]), "AssertionError"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error, in raftkv.some line 2"),
        (OSError(errno.EIO, "Input/output error", "/a/b"), "/a/b: Input/output error"),
        (StorageError(), "StorageError, in raftkv.some line 2"),
        (StorageError("no\nroom"), "no room"),
        (ValueError("two\nlines"), "ValueError: two lines, in raftkv.some line 2"),
    ],
    ids=repr,
)
def test_a_reason_is_one_line_that_is_never_empty(error: BaseException, expected: str) -> None:
    assert explain(_raised(error)) == expected
