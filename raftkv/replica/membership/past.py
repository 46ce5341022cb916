"""A member that runs on an older copy of its data: other members notice it, and it stops.

Such a member breaks what Raft depends on: it can vote twice in a term, and elect a leader without entries that it has
acknowledged. Each member remembers, as long as its process runs, in which term another voted and which committed entry
it acknowledged (``Raft.promised``). A member states its term and the end of its log in the metadata of every stream
that it opens. The receiver compares them.

    past.statement(raft)                        # ((raftkv-log, 5/1200),)
    past.refusal(raft, sender, metadata)        # why the sender's data is older than its promises; empty if it is not
    past.is_refusal(text)

Not here: a member whose peers have been restarted since. The leader may still tell it of a commit index beyond its log,
and a peer that follows a leader without committed entries stops too (``raft.errors``: ``LogLostError``, ``ForkError``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from raftkv.raft.core import Raft

LOG_KEY: Final = "raftkv-log"
_STATEMENT: Final = re.compile(r"(\d{1,20})/(\d{1,20})")
_TEXT: Final = "runs on an older copy of its data"


def statement(raft: Raft) -> tuple[tuple[str, str], ...]:
    """Return the metadata that states this member's term and the end of its log."""
    return ((LOG_KEY, f"{raft.term}/{raft.log.last_index}"),)


def refusal(raft: Raft, sender: int, metadata: Mapping[str, Any]) -> str:
    """Return why a member must not take part with its data; empty if it may, or if its version states nothing.

    Arguments:
        raft: core of this member.
        sender: id of the other member.
        metadata: metadata of its call.
    """
    match = _STATEMENT.fullmatch(str(metadata.get(LOG_KEY, "")))
    if match is None:
        return ""
    (term, last_index), (voted, acknowledged) = (int(match[1]), int(match[2])), raft.promised(sender)
    if term >= voted and last_index >= acknowledged:
        return ""
    return (
        f"member {sender:x} {_TEXT}: it had voted in term {voted} and acknowledged entry {acknowledged}, "
        f"and has term {term} and a log that ends at {last_index}"
    )


def is_refusal(text: str) -> bool:
    """Return whether a peer's error text refuses this member because of the age of its data."""
    return _TEXT in text
