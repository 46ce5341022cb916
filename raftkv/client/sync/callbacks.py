"""Callbacks of the user, run away from the loop's thread: they may block, and may use the client.

A ``CallbackQueue`` runs them one after the other, in order, on a thread that lives only while there are any. What a
callback raises goes to ``threading.excepthook``, as from any thread, and the next one is run all the same.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any


class CallbackQueue:
    """Callbacks that run in order."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._lock = threading.Lock()
        self._is_running = False

    def call_soon(self, callback: Callable[..., Any], *arguments: Any) -> None:
        """Queue a callback; returns at once.

        Arguments:
            callback: what to call.
            arguments: for it.
        """
        with self._lock:
            self._waiting.append((callback, arguments))
            if self._is_running:
                return
            self._is_running = True
        threading.Thread(target=self._run, name="raftkv-callbacks", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_running = False
                    return
                callback, arguments = self._waiting.popleft()
            try:
                callback(*arguments)
            except Exception:
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
