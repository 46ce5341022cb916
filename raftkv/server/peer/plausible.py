"""Whether another member can have sent a message, by its numbers alone.

    verify(message, node_term)        # raises InvalidMessage for what would be damage or a forgery

The Raft core takes any message that follows the rules of Raft, as etcd's does: scripts step terms into it that no
election reached. Between members such a number is damage, or forged: the last term there is would leave no term to
come, and a log that ends with it would win every election.
"""

from __future__ import annotations

from raftkv.raft.core import WITHOUT_TERM
from raftkv.raft.errors import InvalidMessage
from raftkv.raft.types import Message

TERMS_AHEAD_MAX = 1 << 32
"""Terms that a message may be ahead of a member: a century of elections, one a second. More would be forged, and a few
such messages would leave no term to come."""


def verify(message: Message, node_term: int) -> None:
    """Verify the terms that a message of another member names.

    Arguments:
        message: as received.
        node_term: of the member that received it.

    Raises:
        InvalidMessage: no member sends it.
    """
    term = message.term
    if not term and message.type not in WITHOUT_TERM:
        raise InvalidMessage("it has no term: the core would take it for this member's own")
    if term > node_term + TERMS_AHEAD_MAX:
        raise InvalidMessage(f"term {term} is too far ahead of {node_term}")
    if not term:
        return
    if message.entries and message.entries[-1].term > term:
        raise InvalidMessage(f"a message of term {term} carries {message.entries[-1]!r}")
    if message.log_term > term or (message.snapshot is not None and message.snapshot.term > term):
        raise InvalidMessage(f"a message of term {term} tells of a log with a later one")
