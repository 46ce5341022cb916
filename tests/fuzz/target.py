"""What a fuzz target is: a parser, samples of what it is meant for, and the errors that it may raise.

    Target("wal-records", lambda directory: decode, samples=lambda: [good], allowed=(RecordError,))

A parser that accepts an input and one that refuses it with a documented error are both right. Everything else is a
finding: another exception, an input that takes too long or too much memory, memory that is not given back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Parse = Callable[[bytes], object]
"""A text that it returns tells kinds of accepted inputs apart."""


@dataclass(frozen=True)
class Target:
    """One parser under test.

    Attributes:
        name: by which it is asked for.
        make: makes the parser; gets an empty directory. It may keep state from one input to the next, and is closed at
            the end if it has a ``close``.
        samples: valid inputs, made by the code that writes them.
        allowed: the errors that the parser documents.
        tokens: pieces of bytes that mean something to it.
        cpu_max_s: processor time for one input.
        memory_max_bytes: most memory while one input is handled, beyond what was used before it.
        growth_max_bytes: what may be kept after any number of inputs.
        examples: inputs in a run of the test suite.
    """

    name: str
    make: Callable[[Path], Parse]
    samples: Callable[[], list[bytes]]
    allowed: tuple[type[BaseException], ...] = ()
    tokens: tuple[bytes, ...] = ()
    cpu_max_s: float = 2.0
    memory_max_bytes: int = 16 << 20
    growth_max_bytes: int = 4 << 20
    examples: int = 60
