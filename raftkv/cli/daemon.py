"""What the commands of ``raftkv`` that serve until a signal comes have in common: their flags, and the help of them.

>>> parse((Flag("listen", default="127.0.0.1:1"),), ["--listen", "127.0.0.1:2"], "gateway").values["listen"]
'127.0.0.1:2'
"""

from __future__ import annotations

from collections.abc import Sequence

from raftkv.cli import pflag
from raftkv.cli.exits import BAD_FLAGS, CommandError
from raftkv.cli.pflag import Flag, Parsed


def parse(flags: Sequence[Flag], words: Sequence[str], command: str, *, takes_rest: bool = False) -> Parsed:
    """The flags of a command that takes nothing else.

    Arguments:
        flags: that it knows.
        words: the command line after its name.
        command: its name.
        takes_rest: what follows ``--`` is passed on to somebody.

    Raises:
        HelpRequested: for help.
        CommandError: a word is no flag of it, or has no such value.
    """
    try:
        parsed = pflag.parse(flags, words)
    except pflag.FlagError as error:
        raise CommandError(str(error), BAD_FLAGS) from None
    if parsed.arguments and not (takes_rest and "--" in words):
        raise CommandError(f"'{parsed.arguments[0]}' is not a valid flag of raftkv {command}", BAD_FLAGS)
    return parsed


def print_flags(flags: Sequence[Flag]) -> None:
    """A line for each, as wide as the longest name needs."""
    width = max(len(flag.name) for flag in flags)
    for flag in flags:
        print(f"  --{flag.name:<{width}} {flag.usage}" + (f" ({flag.default})" if flag.default else ""))
