"""Who introduces itself on the peer port, and is no member as far as is known here: a few of them are remembered.

It may have become one after all that is applied here, so what it says is kept like a member's. On a port without TLS
anybody can say so of any id, so of ``STRANGERS_MAX`` and one the first is forgotten.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any, Final

STRANGERS_MAX: Final = 64


def make_room(kept: dict[int, Any], members: Container[int]) -> None:
    """Forget the first stranger if there are too many for one more.

    Arguments:
        kept: by the id of who introduced itself, in the order in which they did.
        members: ids that are kept whatever comes.
    """
    strangers = [one for one in kept if one not in members]
    if len(strangers) >= STRANGERS_MAX:
        del kept[strangers[0]]
