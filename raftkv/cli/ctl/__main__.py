"""raftkvctl: the command line of a cluster, with etcdctl's commands, flags, output and exit codes.

Owns the program: its failures become one line and an exit code. Which commands there are is in ``tree``; what they do
is in ``kv``, ``txn``, ``cluster``, ``cli.runs.commands``, ``about`` and others of that kind; how they reach the cluster
is in ``session``; how answers look is in ``cli.output.printer``.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

from raftkv.cli.ctl.tree import COMPLETION_VARIABLE, NAME, make_tree
from raftkv.cli.exits import ERROR, CommandError
from raftkv.cli.goflags.command import Branch, dispatch
from raftkv.cli.program import leave


def main(words: Sequence[str] | None = None) -> int:
    """Run raftkvctl.

    Arguments:
        words: the command line after the program's name; None: this process's.

    Returns:
        The exit code.
    """
    if words is None:
        # A command lives for a moment and makes no cycles worth finding: the collector would only slow its imports.
        gc.disable()
    tree = make_tree()
    if instruction := os.environ.get(COMPLETION_VARIABLE):
        from click.shell_completion import shell_complete

        return shell_complete(tree, {}, NAME, COMPLETION_VARIABLE, instruction)
    given = sys.argv[1:] if words is None else words
    return leave(lambda: _run(tree, given), lambda text: print(f"Error: {text}", file=sys.stderr))


def _run(tree: Branch, words: Sequence[str]) -> int:
    _check_api_version()
    try:
        return dispatch(tree, words)
    except CommandError as error:
        if error.details:
            sys.stdout.flush()
        for line in error.details:
            print(f"{NAME}: {line}", file=sys.stderr)
        raise
    except UnicodeEncodeError:  # keys and values are bytes; it may be a password, so it is not shown
        raise CommandError("names, passwords and versions must be UTF-8", ERROR) from None


def _check_api_version() -> None:
    version = os.environ.pop("ETCDCTL_API", "")
    if version not in ("", "3"):
        raise CommandError(f"unsupported API version: {version}", ERROR)


if __name__ == "__main__":
    sys.exit(main())
