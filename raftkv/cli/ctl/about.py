"""``raftkvctl options``, ``version`` and ``completion``."""

from __future__ import annotations

from raftkv import __version__
from raftkv.cli.goflags.command import Invocation
from raftkv.cli.program import API_VERSION


def version(invocation: Invocation) -> None:
    """Print the version of this program and of the API."""
    print(f"raftkvctl version: {__version__}")
    print(f"API version: {API_VERSION}")


def options(invocation: Invocation) -> None:
    """Describe the options that every command has."""
    from raftkv.cli.ctl.tree import GLOBAL_FLAGS
    from raftkv.cli.goflags.command import Page, flag_row

    formatter = Page(max_width=80)
    formatter.write_text("Every command of raftkvctl takes these options, before or after its name.")
    formatter.write_text("An option that is not given is taken from its environment variable.")
    formatter.write_paragraph()
    formatter.write_dl([flag_row(flag) for flag in GLOBAL_FLAGS], col_max=26)
    formatter.write_paragraph()
    formatter.write_text("A DURATION is a number with a unit: 300ms, 1.5s, 2m. A LIST is separated by commas.")
    print(formatter.getvalue(), end="")


def completion(invocation: Invocation) -> None:
    """Print the script that makes a shell complete raftkvctl's commands and flags."""
    from raftkv.cli.completion import print_script
    from raftkv.cli.ctl import tree as ctl

    print_script(ctl.make_tree(), ctl.NAME, ctl.COMPLETION_VARIABLE, invocation.arguments)
