"""Strangers on the peer port: callers whose id is not that of a member as far as this member knows.

Such a caller may have become a member by an entry that is not applied here yet, so what it says is kept as a member's
is. On a port without TLS anybody can claim any id, so at most ``STRANGERS_MAX`` are kept: beyond that, the first one is
forgotten.
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
