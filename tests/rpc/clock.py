"""A test on a loop whose time stands still until the test moves it; sockets go on as they are.

A loaded machine makes no timer expire: between two calls of ``Clock.pass_s`` no time passes.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine
from typing import Any

TEST_TIMEOUT_S = 90.0
"""Real time that a test may take."""


class Clock:
    """The running loop's time."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._now_s = loop.time()
        loop.time = lambda: self._now_s

    async def pass_s(self, seconds: float) -> None:
        """Let so much time pass, and what was due in it happen."""
        self._now_s += seconds
        for _ in range(5):
            await asyncio.sleep(0)


def on_clock(function: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a plain test of an async one that takes a ``Clock`` first; a test that hangs fails."""

    async def bounded(*arguments: Any, **named: Any) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        watchdog = threading.Timer(TEST_TIMEOUT_S, loop.call_soon_threadsafe, (task.cancel,))
        watchdog.start()
        try:
            await function(Clock(), *arguments, **named)
        finally:
            watchdog.cancel()
            watchdog.join()

    @functools.wraps(function)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(bounded(*arguments, **named))

    signature = inspect.signature(function)
    # Without the clock: pytest would look for a fixture of that name.
    run.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
    return run
