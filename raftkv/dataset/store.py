"""What datasets need of the store: transactions, watches, leases, and reads of chunks from any member.

A chunk is the same wherever it is read, so a follower may serve it (serializable); one that has not got it yet is not
believed: then the leader is asked.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raftkv.client.control.control import ClientControl, Control, check_whole
from raftkv.client.rpc.retry import until_answered

if TYPE_CHECKING:
    from raftkv.client.library import Client

Read = Callable[[str], Awaitable[bytes | None]]


@dataclass(frozen=True, slots=True)
class Store:
    """What datasets work with.

    Attributes:
        control: transactions, watches, leases.
        read: returns the value of a key that never changes; None: there is none.
    """

    control: Control
    read: Read


def through(kv: Client) -> Store:
    """Return the store as a client reaches it.

    Raises:
        ConfigError: the client is a view.
    """

    async def read(key: str) -> bytes | None:
        item: Any = await until_answered(lambda: kv.get(key, serializable=True))
        if item is None:
            item = await until_answered(lambda: kv.get(key))
        return None if item is None else bytes(item.value)

    return Store(ClientControl(check_whole(kv)), read)
