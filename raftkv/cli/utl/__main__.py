"""raftkvutl: the command line for data directories and snapshot files, with etcdutl's commands and exit codes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from raftkv.cli.command import dispatch
from raftkv.cli.common import run_program
from raftkv.cli.utl.tree import make_tree


def main(words: Sequence[str] | None = None) -> int:
    """Run raftkvutl.

    Arguments:
        words: the command line after the program's name; None: this process's.

    Returns:
        The exit code.
    """
    tree = make_tree()
    return run_program(tree, lambda: dispatch(tree, sys.argv[1:] if words is None else words))


if __name__ == "__main__":
    sys.exit(main())
