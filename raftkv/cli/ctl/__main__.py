"""raftkvctl: the command line of a cluster, with etcdctl's commands, flags, output and exit codes.

The main program: reports failures as one line and an exit code. ``tree`` defines the commands and their functions;
``session`` connects to the cluster; ``cli.printer`` prints answers.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

from raftkv.cli.command import Branch, dispatch
from raftkv.cli.common import run_program
from raftkv.cli.ctl.tree import make_tree
from raftkv.cli.program import ERROR, CommandError


def main(words: Sequence[str] | None = None) -> int:
    """Run raftkvctl.

    Arguments:
        words: the command line after the program's name; None: this process's.

    Returns:
        The exit code.
    """
    if words is None:
        # A command runs for a moment and creates few cycles, so garbage collection would only slow its imports.
        gc.disable()
    tree = make_tree()
    given = sys.argv[1:] if words is None else words
    return run_program(tree, lambda: _run(tree, given))


def _run(tree: Branch, words: Sequence[str]) -> int:
    _check_api_version()
    try:
        return dispatch(tree, words)
    except UnicodeEncodeError:  # not UTF-8; not shown, because it may be a password
        raise CommandError("names, passwords and versions must be UTF-8", ERROR) from None


def _check_api_version() -> None:
    version = os.environ.pop("ETCDCTL_API", "")
    if version not in ("", "3"):
        raise CommandError(f"unsupported API version: {version}", ERROR)


if __name__ == "__main__":
    sys.exit(main())
