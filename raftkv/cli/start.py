"""Entry points of the three programs; Ctrl-C ends them quietly, even during imports.

The imports take 0.1 s, in which Python would answer SIGINT with a traceback. This module therefore resets SIGINT when
it is imported, and ``program.leave`` catches SIGINT again.

After Ctrl-C and the cleanup, a program ends by that signal. If it ended with an exit code instead, a shell would
continue its script or loop.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
from typing import NoReturn

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not in a shell's background job: SIGINT is ignored
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def raftkv() -> int:
    """Run the server's command line; return its exit code."""
    from raftkv.cli.main import main

    return _as_ended(main())


def raftkvctl() -> NoReturn:
    """Run the client's command line, and end the process with its exit code."""
    from raftkv.cli.ctl.__main__ import main

    _end(main())


def raftkvutl() -> int:
    """Run the command line for data directories; return its exit code."""
    from raftkv.cli.utl.__main__ import main

    return _as_ended(main())


def _as_ended(code: int) -> int:
    """Return the exit code; after Ctrl-C, raise KeyboardInterrupt silently, so that Python ends by the signal."""
    from raftkv.cli.program import CTRL_C

    if code == CTRL_C:
        sys.excepthook = lambda *_: None
        raise KeyboardInterrupt
    return code


def _end(code: int) -> NoReturn:
    """End the process as Python does, but without unloading modules, which takes a tenth of a short command's time.

    ``program.leave`` has flushed the output, except for an incomplete line on standard error; threads of these programs
    are daemons.
    """
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):  # the reader is gone
        sys.stderr.flush()
    from raftkv.cli.program import CTRL_C

    if code == CTRL_C:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)
