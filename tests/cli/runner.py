"""Run a command line of raftkv inside the test's process, with its own standard streams and environment.

In-process because a process start costs more than most commands; the programs as installed are run by
``test_programs.py``.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from raftkv.cli import main as server_main
from raftkv.cli.ctl import __main__ as ctl
from raftkv.cli.utl import __main__ as utl


@dataclass(frozen=True)
class Ran:
    """What a command did."""

    code: int
    output: bytes
    errors: str


def run_ctl(words: Sequence[str], standard_input: bytes = b"", environment: Mapping[str, str] | None = None) -> Ran:
    """Run raftkvctl."""
    return _run(ctl.main, words, standard_input, environment or {})


def run_utl(words: Sequence[str], environment: Mapping[str, str] | None = None) -> Ran:
    """Run raftkvutl."""
    return _run(utl.main, words, b"", environment or {})


def run_server(words: Sequence[str], environment: Mapping[str, str] | None = None) -> Ran:
    """Run raftkv; for command lines that end by themselves."""
    return _run(server_main.main, words, b"", environment or {})


def _run(
    main: Callable[[Sequence[str]], int], words: Sequence[str], standard_input: bytes, environment: Mapping[str, str]
) -> Ran:
    with _streams(standard_input) as (output, errors), _environment(environment):
        code = main(words)
        output.flush()
        errors.flush()
        return Ran(code, output.buffer.getvalue(), errors.buffer.getvalue().decode())


@contextmanager
def _streams(standard_input: bytes):
    saved = sys.stdin, sys.stdout, sys.stderr
    output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="surrogateescape")
    errors = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    sys.stdin, sys.stdout, sys.stderr = io.TextIOWrapper(io.BytesIO(standard_input)), output, errors
    try:
        yield output, errors
    finally:
        sys.stdin, sys.stdout, sys.stderr = saved


@contextmanager
def _environment(given: Mapping[str, str]):
    """Exactly these ETCD* variables."""
    saved = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("ETCD")}
    os.environ.update(given)
    try:
        yield
    finally:
        for name in given:
            os.environ.pop(name, None)
        os.environ.update(saved)
