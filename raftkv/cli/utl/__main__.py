"""raftkvutl: the command line for data directories and snapshot files, with etcdutl's commands and exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from raftkv.cli.exits import ERROR, CommandError
from raftkv.cli.goflags.command import dispatch
from raftkv.cli.program import leave
from raftkv.cli.utl.tree import COMPLETION_VARIABLE, NAME, make_tree
from raftkv.errors import RaftKVError


def main(words: Sequence[str] | None = None) -> int:
    """Run raftkvutl.

    Arguments:
        words: the command line after the program's name; None: this process's.

    Returns:
        The exit code.
    """
    tree = make_tree()
    if instruction := os.environ.get(COMPLETION_VARIABLE):
        from click.shell_completion import shell_complete

        return shell_complete(tree, {}, NAME, COMPLETION_VARIABLE, instruction)

    def run() -> int:
        try:
            return dispatch(tree, sys.argv[1:] if words is None else words)
        except RaftKVError as error:  # what the store says of a file is written for users
            raise CommandError(str(error), ERROR) from None

    return leave(run, lambda text: print(f"Error: {text}", file=sys.stderr))


if __name__ == "__main__":
    sys.exit(main())
