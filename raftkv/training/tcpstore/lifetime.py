"""How long the keys of a gateway's store live: as long as a gateway of that name does, and a while longer.

The store of a job that has ended must not be met by the next job of that name: stock torchrun would find its run
closed. With TCPStore it is gone with its process; here it is with the *last* of the gateways, which may be many, one a
node, and may be started again:

1. Each gateway keeps a leased key. One that is stopped gives the lease back; that of one that was killed ends later.
2. A gateway that starts and finds no such key deletes what is there. Looking and deleting are one txn.
3. A running gateway never deletes. If its lease is lost, as when all of raftkv was away, it takes another.
"""

from __future__ import annotations

import secrets
from typing import Final

from raftkv import aio
from raftkv.training.tcpstore.writer import OnTrouble, persist

LINGER_S: Final = 60
_PARTS: Final = ("k/", "q/", "t/", "w/")


class StoreLifetime:
    """One gateway's part in the life of its store.

    Arguments:
        kv: the client.
        prefix: of the store; ends with a slash.
        linger_s: how long the keys outlive a gateway that was killed.
        fresh: delete what is there in any case.
    """

    def __init__(
        self, kv: aio.Client, prefix: str, linger_s: int, *, fresh: bool = False, on_trouble: OnTrouble | None = None
    ) -> None:
        self._kv = kv.view(prefix)
        self._session = self._kv.session(linger_s)
        self._fresh = fresh
        self._on_trouble = on_trouble
        self._key = f"g/{secrets.token_hex(6)}"

    async def begin(self) -> bool:
        """Move in; tells whether the store was begun anew. Tries until raftkv answers.

        Raises:
            StatusError: it refuses for good.
        """
        await persist(self._session.establish, self._on_trouble)
        began = await persist(self._announce, self._on_trouble)
        await persist(lambda: self._session.keep(self._key, b""), self._on_trouble)
        return began

    async def _announce(self) -> bool:
        here = aio.put(self._key, lease=self._session)
        # Holds for an interval without keys, and for no other. Its own key, if an earlier attempt came through, counts:
        # a copy that was held up must not delete what clients have written since.
        mine = aio.create_revision(self._key) == 0
        alone = [mine] if self._fresh else [aio.create_revision("g/", prefix=True) == 0]
        clear = [aio.delete(part, prefix=True) for part in _PARTS]
        return (await self._kv.txn().when(*alone).then(*clear, here).otherwise(here).commit()).succeeded

    async def end(self) -> None:
        """Move out; the last one leaves the keys to whoever comes next, to delete."""
        await self._session.close()
