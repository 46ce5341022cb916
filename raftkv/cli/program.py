"""The frame of every command line: how a program ends, including after a failure.

When ``raftkv --help | head -1`` closes the pipe early, the program ends silently, like other programs. A full disk
behind ``> file`` is reported as one line. Without this module, Python would print a traceback when it flushes the rest
at exit. Passwords in memory stay out of core dumps.

>>> leave(lambda: 7, print)
7

Each failure that a user can cause is a ``CommandError``: one line on standard error and an exit code, never a
    traceback.
The program's format of that line is passed as ``complain``.
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

# Exit codes are etcdctl's, because scripts test them.

SUCCESS: Final = 0
ERROR: Final = 1
"""The cluster refused or could not be reached, or a flag is wrong."""
BAD_CONNECTION: Final = 2
"""The client could not be created, for example because the password is wrong."""
INVALID_INPUT: Final = 3
"""A transaction that cannot be parsed."""
BAD_FEATURE: Final = 4
"""An invalid value of a flag, or an output format that the command does not support."""
INTERRUPTED: Final = 5
"""The server ended a watch."""
BAD_ARGUMENTS: Final = 128
"""Too few or too many arguments, or conflicting flags."""
BAD_FLAGS: Final = 2
"""The server's exit code for an invalid flag."""


class CommandError(Exception):
    """Ends the command with an exit code and a line on standard error (no line if the text is empty).

    Arguments:
        text: the line.
        code: exit code of the program.
        details: further lines with the cause, for when the first line is etcdctl's and scripts match it.
    """

    def __init__(self, text: str, code: int = ERROR, details: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.code = code
        self.details = tuple(details)


@contextlib.contextmanager
def refused(
    kinds: type[Exception] | tuple[type[Exception], ...], code: int = ERROR, frame: str = "{}"
) -> Iterator[None]:
    """Convert given errors to a ``CommandError``, because their texts are written for users.

    Arguments:
        kinds: types of the errors.
        code: exit code of the program.
        frame: format string around the text, as in etcdctl.

    Raises:
        CommandError: such an error occurred.
    """
    try:
        yield
    except kinds as error:
        raise CommandError(frame.format(error), code) from None


API_VERSION: Final = "3.7"
"""The supported version of etcd's API."""

COMMANDS: Final[Mapping[str, str]] = {
    "cluster": "raftkv.cli.cluster:main",
    "backup": "raftkv.cli.backup:main",
    "doctor": "raftkv.cli.doctor:main",
    "certs": "raftkv.cli.certs:main",
    "join": "raftkv.cli.join:main",
    "torchft-lighthouse": "raftkv.cli.daemon:lighthouse",
    "tcpstore-gateway": "raftkv.cli.daemon:gateway",
}
"""The commands of ``raftkv`` and their functions; also used in error texts of the other programs."""


def imported(target: str) -> Any:
    """Import and return the function ``module:function``; lazy, so that a program loads only the command it runs."""
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)


STOPPING: Final = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def on_signals(call: Callable[[], object], numbers: Sequence[int] = STOPPING) -> Iterator[None]:
    """Call a function on the running loop at signals during the block; works only in the main thread."""
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
"""The exit code that a shell shows for a program ended by Ctrl-C; ``start`` then ends the process by that signal."""


def leave(body: Callable[[], int], complain: Callable[[str], None], name: str = "raftkv") -> int:
    """Run a program to its end and flush its output.

    Arguments:
        body: the program; returns its exit code.
        complain: prints a line to standard error.
        name: name of the program, printed before the details of a failure.

    Returns:
        The exit code.
    """
    _open_closed_streams()
    _write_to_the_end()
    _take_any_bytes()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as set by ``start``
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.getpid() == 1 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        # The kernel ignores a signal that the first process of a container does not handle.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
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
    """Print a failure in one line; errors of raftkv are written for users, others are unexpected."""
    _discard_output()
    from raftkv.errors import RaftKVError, explain

    if isinstance(error, RaftKVError):
        text = " ".join(str(error).split())
    elif isinstance(error, OSError):
        text = described(error)
    else:
        text = f"{explain(error)}; {'give it more memory' if isinstance(error, MemoryError) else 'report this line'}"
    with contextlib.suppress(OSError):
        complain(_shown(text))
    return ERROR


def _shown(text: str) -> str:
    """Return a text of an error without control sequences for the terminal: it may name what others have stored."""
    from raftkv.errors import printable

    return "\n".join(map(printable, text.split("\n")))


def _open_closed_streams() -> None:
    """Open /dev/null for standard streams that were closed at the start (``>&-``).

    Otherwise the next file or socket would get the descriptor, and with it the output for that stream.
    """
    for name in ("stdin", "stdout", "stderr"):  # in the order of their descriptors, because the lowest free one is used
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDONLY if name == "stdin" else os.O_WRONLY)
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w", encoding="utf-8", closefd=False))


def _write_to_the_end() -> None:
    """Use line buffering for standard output if it is unbuffered (``PYTHONUNBUFFERED``).

    Without a buffer, Python ignores that the system may write only a part of the printed text.
    """
    stdout = sys.stdout
    if isinstance(stdout, io.TextIOWrapper) and isinstance(stdout.buffer, io.RawIOBase):
        whole = io.BufferedWriter(stdout.buffer)
        sys.stdout = io.TextIOWrapper(whole, stdout.encoding, stdout.errors, line_buffering=True)


def _take_any_bytes() -> None:
    """Accept input and output that is not text in the locale, because file names are bytes."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    if isinstance(sys.stdout, io.TextIOWrapper):
        is_utf_8 = codecs.lookup(sys.stdout.encoding).name == "utf-8"
        sys.stdout.reconfigure(errors="surrogateescape" if is_utf_8 else "backslashreplace")


def _keep_memory_out_of_core_dumps() -> None:
    """Keep memory out of core dumps on Linux, because it contains passwords, tokens and keys.

    This sets the core dump filter. A size limit would not be enough: the kernel ignores it when it pipes dumps to a
    program.
    """
    with contextlib.suppress(OSError), open("/proc/self/coredump_filter", "w") as file:
        file.write("0")


def _ended(body: Callable[[], int], complain: Callable[[str], None], name: str) -> int:
    try:
        code = body()
    except CommandError as error:
        sys.stdout.flush()
        if str(error):
            complain(_shown(str(error)))
        for line in error.details:
            print(f"{name}: {_shown(line)}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt as interrupt:
        _drop(interrupt)
        code = CTRL_C
    sys.stdout.flush()
    return code


def _drop(interrupt: KeyboardInterrupt) -> None:
    """Free the interrupted frames without their warnings, for example about a coroutine that was never awaited."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda report: None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        interrupt.__traceback__ = interrupt.__context__ = None
    sys.unraisablehook = hook


def _discard_output() -> None:
    """Redirect streams that cannot be flushed to /dev/null."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                os.dup2(null, stream.fileno())
        os.close(null)


def described(error: OSError) -> str:
    """Return one line about an error of the system: the file, and the problem."""
    why = error.strerror or str(error)
    if error.filename is not None:
        return f"{error.filename}: {why}"
    if error.errno == errno.ENOENT and _is_nowhere():
        return "the current directory no longer exists: change to another one, then start this again"
    return why


def _is_nowhere() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False
