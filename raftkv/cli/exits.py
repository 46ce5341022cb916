"""Exit codes of the command lines, and the one exception that ends a command.

The codes are etcdctl's, because scripts test them. Every failure that a user can cause becomes a ``CommandError``:
one line on standard error and a code, never a traceback.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

SUCCESS: Final = 0
ERROR: Final = 1
"""The cluster refused, or could not be reached, or a flag is wrong."""
BAD_CONNECTION: Final = 2
"""No client could be made, for example because the password is wrong."""
INVALID_INPUT: Final = 3
"""A transaction that cannot be read."""
BAD_FEATURE: Final = 4
"""A value that a flag does not know, or an output format that the command does not have."""
INTERRUPTED: Final = 5
"""The server has ended a watch."""
BAD_ARGUMENTS: Final = 128
"""Too few or too many arguments, or flags that exclude each other."""
BAD_FLAGS: Final = 2
"""The server's code for a flag that it cannot read."""


class CommandError(Exception):
    """Ends the command with a code and a line on standard error (no line if the text is empty).

    Arguments:
        text: the line.
        code: exit code of the program.
        details: lines that stand before it, e.g. which endpoints failed and why.
    """

    def __init__(self, text: str, code: int = ERROR, details: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.code = code
        self.details = tuple(details)
