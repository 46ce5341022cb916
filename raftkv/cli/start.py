"""Entry points of the three programs: Ctrl-C ends them quietly, also during their imports.

The imports take a tenth of a second, in which Python would answer SIGINT with a traceback. This module therefore resets
SIGINT when it is imported, and ``program.leave`` catches SIGINT again.

After Ctrl-C and its clean-up a program ends by that signal. With an exit code of its own, a shell would go on with its
script or loop.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
from typing import NoReturn

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not in the background of a shell, which ignores it
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def raftkv() -> int:
    """Run the server's command line; its exit code."""
    from raftkv.cli.main import main

    return _as_ended(main())


def raftkvctl() -> NoReturn:
    """Run the client's command line, and end the process with its exit code."""
    from raftkv.cli.ctl.__main__ import main

    _end(main())


def raftkvutl() -> int:
    """Run the command line for data directories; its exit code."""
    from raftkv.cli.utl.__main__ import main

    return _as_ended(main())


def _as_ended(code: int) -> int:
    """Return the exit code; after Ctrl-C raise what Python ends a program by with the signal, and say nothing."""
    from raftkv.cli.program import CTRL_C

    if code == CTRL_C:
        sys.excepthook = lambda *_: None
        raise KeyboardInterrupt
    return code


def _end(code: int) -> NoReturn:
    """End the process as Python does, but for taking apart its modules: a tenth of the time of a short command.

    What was printed is written out by ``program.leave``, but for the beginning of a line on standard error; threads
    that run here are daemons.
    """
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):  # the reader is gone
        sys.stderr.flush()
    from raftkv.cli.program import CTRL_C

    if code == CTRL_C:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)
