"""``raftkvutl version`` and ``completion``."""

from __future__ import annotations

from raftkv import __version__
from raftkv.cli.goflags.command import Invocation
from raftkv.cli.program import API_VERSION


def version(invocation: Invocation) -> None:
    """Print the version of this program and of the API."""
    print(f"raftkvutl version: {__version__}")
    print(f"API version: {API_VERSION}")


def completion(invocation: Invocation) -> None:
    """Print the script that makes a shell complete raftkvutl's commands and flags."""
    from raftkv.cli.completion import print_script
    from raftkv.cli.utl import tree

    print_script(tree.make_tree(), tree.NAME, tree.COMPLETION_VARIABLE, invocation.arguments)
