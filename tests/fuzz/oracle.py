"""The three oracles over one input: no crash, no hang, no growth.

- *crash*: an exception that the parser does not document; ``AssertionError`` and ``MemoryError`` among them.
- *hang*: processor time of this process beyond the limit, cut by a signal even inside a loop.
- *growth*: the peak of traced memory during one input, and what is left of it after many.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import tempfile
import traceback
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from tests.fuzz.target import Target

SHOWN_BYTES = 400
"""How much of an input the text of a finding shows."""

GROWTH_EVERY = 2_000
"""Inputs between two looks at what is left of them."""

GROWTH_WARM_UP = 500
"""Inputs before the first: caches of modules are filled by then."""


class FuzzFailure(Exception):
    """A finding: what happened, and the input that did it."""

    def __init__(self, target: str, data: bytes, what: str) -> None:
        shown = data[:SHOWN_BYTES].hex() or "(empty)"
        if len(data) > SHOWN_BYTES:
            shown += f"... {len(data)} bytes, all of them in {_kept(target, data)}"
        super().__init__(f"{target}: {what}\n    input: {shown}")
        self.target = target
        self.data = data
        self.what = what


def _kept(target: str, data: bytes) -> Path:
    path = Path(tempfile.gettempdir()) / f"fuzz-{target}.hex"
    path.write_text(data.hex())
    return path


class _Hang(BaseException):
    """Not an ``Exception``: the code under test must not handle it."""


def _hang(number: int, frame: FrameType | None) -> None:
    raise _Hang


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Trace memory and take the timer of processor time, for what is measured inside."""
    traced_before = tracemalloc.is_tracing()
    if not traced_before:
        tracemalloc.start(1)
    old = signal.signal(signal.SIGVTALRM, _hang)
    try:
        yield
    finally:
        signal.signal(signal.SIGVTALRM, old)
        if not traced_before:
            tracemalloc.stop()


class Judge:
    """A target with its parser, input after input; inside ``watched``."""

    def __init__(self, target: Target, directory: Path) -> None:
        self.target = target
        self.inputs = 0
        self._parse = target.make(directory)
        self._base_bytes: int | None = None
        self._descriptors: int | None = None
        self.peak_bytes = 0

    def close(self) -> None:
        """Let go of what the parser holds."""
        close = getattr(self._parse, "close", None)
        if close is not None:
            close()

    def judge(self, data: bytes) -> str:
        """Hand an input to the parser; what came of it, in a word that is the same for what is alike.

        Raises:
            FuzzFailure: it was not what the target promises.
        """
        target = self.target
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        signal.setitimer(signal.ITIMER_VIRTUAL, target.cpu_max_s)
        try:
            outcome = self._outcome(data)
        except _Hang:
            raise FuzzFailure(target.name, data, f"more than {target.cpu_max_s} s of processor time") from None
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        _, peak = tracemalloc.get_traced_memory()
        self.peak_bytes = max(self.peak_bytes, peak - before)
        if peak - before > target.memory_max_bytes:
            raise FuzzFailure(target.name, data, f"{peak - before} bytes of memory for {len(data)} of input")
        self.inputs += 1
        if self.inputs == GROWTH_WARM_UP or self.inputs % GROWTH_EVERY == 0:
            self.check_growth(data)
        return outcome

    def _outcome(self, data: bytes) -> str:
        try:
            found = self._parse(data)
        except self.target.allowed as error:
            return f"{type(error).__name__} {_shape(str(error))}"
        except Exception as error:
            where = "".join(traceback.format_exception(error)[-6:])
            raise FuzzFailure(self.target.name, data, f"{type(error).__name__}: {error}\n{where}") from error
        return f"taken {found}" if isinstance(found, str) else "taken"

    def check_growth(self, data: bytes = b"") -> None:
        """Look at what is left of all inputs so far.

        Raises:
            FuzzFailure: more than the target may keep.
        """
        gc.collect()
        left, _ = tracemalloc.get_traced_memory()
        descriptors = len(os.listdir("/proc/self/fd"))
        if self._base_bytes is None or self._descriptors is None:
            self._base_bytes, self._descriptors = left, descriptors
        grown = left - self._base_bytes
        if grown > self.target.growth_max_bytes:
            raise FuzzFailure(self.target.name, data, f"{grown} bytes are left of {self.inputs} inputs")
        if descriptors > self._descriptors + 8:
            raise FuzzFailure(self.target.name, data, f"{descriptors - self._descriptors} files are left open")


def _shape(text: str) -> str:
    """The text of an error without what differs from input to input."""
    return "".join("0" if char.isdigit() else char for char in text[:60] if char.isprintable())
