"""Commands that a command of ours runs: for each change, or while a lock is held.

Owns the words and codes of their failures, which are those of Go's ``os/exec``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence

KILLED_EXIT = 255
"""What etcdctl leaves with when the command was ended by a signal."""


class ChildFailed(Exception):
    """The command could not be started, or failed; ``code`` is what to leave with."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


async def start(words: Sequence[str], variables: Mapping[str, str]) -> asyncio.subprocess.Process:
    """Start a command with more environment; its output is ours, its input is empty.

    Arguments:
        words: the command.
        variables: added to the environment.

    Raises:
        ChildFailed: it cannot be started.
    """
    sys.stdout.flush()
    # When this command is ended just as its child ends, both the transport and the child watcher collect the exit
    # status; asyncio tells its log that the second found none, which is no news to anybody.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    try:
        return await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.DEVNULL, env={**os.environ, **variables}
        )
    except FileNotFoundError:
        if "/" in words[0]:
            raise ChildFailed(f"fork/exec {words[0]}: no such file or directory", 1) from None
        raise ChildFailed(f'exec: "{words[0]}": executable file not found in $PATH', 1) from None
    except OSError as error:
        raise ChildFailed(f"fork/exec {words[0]}: {(error.strerror or str(error)).lower()}", 1) from None


async def finish(child: asyncio.subprocess.Process) -> None:
    """Wait for its end.

    Raises:
        ChildFailed: it did not end with 0.
    """
    code = await child.wait()
    if code < 0:
        name = signal.strsignal(-code) or f"signal {-code}"
        raise ChildFailed(f"signal: {name.lower()}", KILLED_EXIT)
    if code:
        raise ChildFailed(f"exit status {code}", code)
