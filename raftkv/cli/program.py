"""The frame of every command line: how a program ends, also after a failure.

``raftkv --help | head -1`` closes the pipe while there is more to print: the program then ends silently, as other
programs do. A full disk behind ``> file`` is one line. Without this module, Python would complain when it flushes the
rest at its exit. Passwords in memory stay out of core dumps.

>>> leave(lambda: 7, print)
7

Each failure that a user can cause is a ``CommandError``: one line on standard error and a code, never a traceback.
Leaves out: how a program words a failure, which it passes as ``complain``.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import importlib
import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

# Exit codes: etcdctl's, because scripts test them.

SUCCESS: Final = 0
ERROR: Final = 1
"""The cluster refused, or could not be reached, or a flag is wrong."""
BAD_CONNECTION: Final = 2
"""No client could be made, for example because the password is wrong."""
INVALID_INPUT: Final = 3
"""A transaction that cannot be read."""
BAD_FEATURE: Final = 4
"""A value that a flag does not know, or an output format that the command does not have."""
INTERRUPTED: Final = 5
"""The server has ended a watch."""
BAD_ARGUMENTS: Final = 128
"""Too few or too many arguments, or flags that exclude each other."""
BAD_FLAGS: Final = 2
"""The server's code for a flag that it cannot read."""


class CommandError(Exception):
    """Ends the command with a code and a line on standard error (no line if the text is empty).

    Arguments:
        text: the line.
        code: exit code of the program.
        details: lines that follow it: the cause, where the line itself is one of etcdctl that scripts match.
    """

    def __init__(self, text: str, code: int = ERROR, details: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.code = code
        self.details = tuple(details)


@contextlib.contextmanager
def refused(
    kinds: type[Exception] | tuple[type[Exception], ...], code: int = ERROR, frame: str = "{}"
) -> Iterator[None]:
    """End the command at such an error: its text is written for users.

    Arguments:
        kinds: of errors.
        code: exit code of the program.
        frame: what stands around the text, as etcdctl has it.

    Raises:
        CommandError: there was one.
    """
    try:
        yield
    except kinds as error:
        raise CommandError(frame.format(error), code) from None


API_VERSION: Final = "3.7"
"""Version of etcd's API that is spoken."""

COMMANDS: Final[Mapping[str, str]] = {
    "cluster": "raftkv.cli.cluster:main",
    "backup": "raftkv.cli.backup:main",
    "doctor": "raftkv.cli.doctor:main",
    "certs": "raftkv.cli.certs:main",
    "join": "raftkv.cli.join:main",
    "torchft-lighthouse": "raftkv.cli.daemon:lighthouse",
    "tcpstore-gateway": "raftkv.cli.daemon:gateway",
}
"""The commands of ``raftkv``, each with the function that runs it; error lines of the other programs use it."""


def imported(target: str) -> Any:
    """Return a function by ``module:function``, imported now: no program waits for the parts of other commands."""
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)


STOPPING: Final = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def on_signals(call: Callable[[], object], numbers: Sequence[int] = STOPPING) -> Iterator[None]:
    """Have the running loop call something at signals, inside the block; only the main thread can."""
    import asyncio

    loop = asyncio.get_running_loop()
    heard = numbers if threading.current_thread() is threading.main_thread() else ()
    for number in heard:
        loop.add_signal_handler(number, call)
    try:
        yield
    finally:
        for number in heard:
            loop.remove_signal_handler(number)


CTRL_C = 130
"""What a shell shows for a program that Ctrl-C has ended; ``start`` then ends it by that signal."""


def leave(body: Callable[[], int], complain: Callable[[str], None], name: str = "raftkv") -> int:
    """Run a program to its end and write out all that it has printed.

    Arguments:
        body: the program; returns its exit code.
        complain: prints a line to standard error.
        name: of the program, before the details of a failure.

    Returns:
        the exit code.
    """
    _open_closed_streams()
    _write_to_the_end()
    _take_any_bytes()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as ``start`` left it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _keep_memory_out_of_core_dumps()
    try:
        return _ended(body, complain, name)
    except BrokenPipeError:
        pass
    except BaseExceptionGroup as group:
        rest = group.split(BrokenPipeError)[1]
        if rest is not None:
            return _failed(rest, complain)
    except SystemExit:
        raise
    except BaseException as error:
        return _failed(error, complain)
    _discard_output()
    return ERROR


def _failed(error: BaseException, complain: Callable[[str], None]) -> int:
    """Say in one line what has failed; our own errors are written for users, others are not expected."""
    _discard_output()
    from raftkv.errors import RaftKVError, explain

    if isinstance(error, RaftKVError):
        text = " ".join(str(error).split())
    elif isinstance(error, OSError):
        text = described(error)
    else:
        text = f"{explain(error)}; {'give it more memory' if isinstance(error, MemoryError) else 'report this line'}"
    with contextlib.suppress(OSError):
        complain(text)
    return ERROR


def _open_closed_streams() -> None:
    """Let streams that were closed at the start (``>&-``) be /dev/null.

    Else the next file or socket would get the number, and what is written there.
    """
    for name in ("stdin", "stdout", "stderr"):  # in the order of their numbers: the lowest free one is given out
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDONLY if name == "stdin" else os.O_WRONLY)
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w", encoding="utf-8", closefd=False))


def _write_to_the_end() -> None:
    """Buffer each line of standard output where nothing is buffered (``PYTHONUNBUFFERED``).

    Without a buffer, Python ignores that the system may write only a part of what is printed at once.
    """
    stdout = sys.stdout
    if isinstance(stdout, io.TextIOWrapper) and isinstance(stdout.buffer, io.RawIOBase):
        whole = io.BufferedWriter(stdout.buffer)
        sys.stdout = io.TextIOWrapper(whole, stdout.encoding, stdout.errors, line_buffering=True)


def _take_any_bytes() -> None:
    """Let what is no text in the locale be read and printed all the same: names of files are bytes."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    if isinstance(sys.stdout, io.TextIOWrapper):
        is_utf_8 = codecs.lookup(sys.stdout.encoding).name == "utf-8"
        sys.stdout.reconfigure(errors="surrogateescape" if is_utf_8 else "backslashreplace")


def _keep_memory_out_of_core_dumps() -> None:
    """On Linux, let a core dump have no memory in it: passwords, tokens and keys are there.

    The filter and not the limit of the size, which does not hold for a program that takes core dumps from the kernel.
    """
    with contextlib.suppress(OSError), open("/proc/self/coredump_filter", "w") as file:
        file.write("0")


def _ended(body: Callable[[], int], complain: Callable[[str], None], name: str) -> int:
    try:
        code = body()
    except CommandError as error:
        sys.stdout.flush()
        if str(error):
            complain(str(error))
        for line in error.details:
            print(f"{name}: {line}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt as interrupt:
        _drop(interrupt)
        code = CTRL_C
    sys.stdout.flush()
    return code


def _drop(interrupt: KeyboardInterrupt) -> None:
    """Free the interrupted frames without warnings of theirs, such as a coroutine that was never awaited."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda report: None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        interrupt.__traceback__ = interrupt.__context__ = None
    sys.unraisablehook = hook


def _discard_output() -> None:
    """Let what is still to be flushed go nowhere."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                os.dup2(null, stream.fileno())
        os.close(null)


def described(error: OSError) -> str:
    """Return one line about an error of the system: what it is about, and what is wrong."""
    why = error.strerror or str(error)
    if error.filename is not None:
        return f"{error.filename}: {why}"
    if error.errno == errno.ENOENT and _is_nowhere():
        return "the directory that this was started in is gone: change to another one, and start it again"
    return why


def _is_nowhere() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False
