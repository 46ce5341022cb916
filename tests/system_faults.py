"""Failing system calls: one run records the calls, and each further run makes one of them fail.

calls = Calls()
with calls.noted():
    ...                             # calls.seen: who in raftkv calls what of the system, phase by phase
with calls.failing({call: errno.EIO}):
    ...                             # the first call of that kind in its phase fails, once
"""

from __future__ import annotations

import builtins
import fcntl
import io
import mmap
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import pytest

ROOT = Path(__file__).resolve().parents[1]
_PLACES = (str(ROOT / "storage"), str(ROOT / "raftkv"))
_PASSED_OVER = tuple(str(Path(os.__file__).parent / name) for name in ("pathlib.py", "shutil.py", "glob.py", "os.py"))
_NAMES = [
    "chmod", "close", "eventfd", "fchmod", "fdatasync", "fstat", "fsync", "ftruncate", "link", "listdir", "lstat",
    "mkdir", "open", "pipe2", "posix_fadvise", "posix_fallocate", "pread", "pwrite", "pwritev", "read", "remove",
    "rename", "replace", "rmdir", "scandir", "stat", "statvfs", "truncate", "unlink", "write",
]  # fmt: skip
_OTHERS: tuple[tuple[Any, str], ...] = (
    (io, "open"), (builtins, "open"), (shutil, "copyfileobj"), (shutil, "copymode"), (mmap, "mmap"), (fcntl, "fcntl"),
    (lmdb, "open"),
)  # fmt: skip


class Call(NamedTuple):
    """A system call: the phase of the test, the function of raftkv that calls, and the call."""

    phase: str
    place: str
    what: str


class Calls:
    """The calls in a test, and the one that fails. Calls of other threads are included."""

    def __init__(self) -> None:
        self.phase = ""
        self.seen: dict[Call, None] = {}
        self._failing: dict[Call, int] = {}
        self._lock = threading.Lock()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Record all calls during the block."""
        with pytest.MonkeyPatch.context() as patches:
            for owner, name in (*((os, name) for name in _NAMES), *_OTHERS):
                patches.setattr(owner, name, self._watched(f"{owner.__name__}.{name}", getattr(owner, name)))
            yield

    @contextmanager
    def failing(self, failures: Mapping[Call, int]) -> Iterator[None]:
        """Let each of these calls fail once during the block, with its error number."""
        self._failing = dict(failures)
        try:
            with self.noted():
                yield
        finally:
            self._failing = {}

    def _watched(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            place = _place(sys._getframe(1))
            if place:
                found = Call(self.phase, place, what)
                self.seen[found] = None
                with self._lock:
                    number = self._failing.pop(found, 0)
                if number:
                    if what == "os.close":
                        function(*arguments)  # close the descriptor anyway, as a failing close does
                    if what == "lmdb.open":
                        raise lmdb.Error(os.strerror(number))
                    name = arguments[0] if arguments and isinstance(arguments[0], str | bytes | os.PathLike) else None
                    raise OSError(number, os.strerror(number), *(() if name is None else (os.fsdecode(name),)))
            return function(*arguments, **options)

        return call


def _place(frame: Any) -> str:
    while frame is not None and frame.f_code.co_filename in _PASSED_OVER:
        frame = frame.f_back
    name = "" if frame is None else frame.f_code.co_filename
    if not name.startswith(_PLACES):
        return ""
    module = name.removeprefix(str(ROOT)).removeprefix("/raftkv").lstrip("/").removesuffix(".py")
    return f"{module}:{frame.f_code.co_qualname}"
