"""How the libraries of the native build are compiled: several files at a time, by as many compilers as processors.

setuptools builds whole libraries side by side if it is asked to, but the largest has a hundred files, of which each
takes seconds.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

from setuptools.command.build_ext import build_ext

COMPILERS_MAX = 8
"""At a time: each takes up to half a GiB."""


class BuildLibraries(build_ext):
    """setuptools' command, with another way through the files of a library."""

    def build_extensions(self) -> None:
        """Compile and link."""
        compile_files = self.compiler.compile

        def compile_side_by_side(sources: list[str], *arguments: Any, **named: Any) -> list[str]:
            with ThreadPoolExecutor(min(os.cpu_count() or 1, COMPILERS_MAX)) as pool:
                made = pool.map(lambda source: compile_files([source], *arguments, **named), sources)
                return list(chain.from_iterable(made))

        self.compiler.compile = compile_side_by_side
        super().build_extensions()
