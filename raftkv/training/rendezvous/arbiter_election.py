"""Who is the arbiter, and this node's turn at it.

Owns the node's view of the ``arbiter`` key and its office. When the key is gone, with the lease of its holder, members
try to take it in rank order, a few milliseconds apart, so that a thousand nodes do not ask at once; whoever comes
first has it. A node that holds the key under its present lease is the arbiter, and nobody else is.
"""

from __future__ import annotations

import asyncio
import math
from typing import Final

from raftkv.client.kv.compares import version
from raftkv.client.kv.operations import Put
from raftkv.client.values import KeyValue
from raftkv.errors import LeaseNotFoundError, StatusError
from raftkv.training.config import RunConfig
from raftkv.training.control import Control
from raftkv.training.keys import RunKeys
from raftkv.training.rendezvous.arbiter_driver import Office
from raftkv.training.rendezvous.record_cache import RecordCache
from raftkv.training.rendezvous.registration import Presence
from raftkv.training.retries import RETRY_MAX_S, RETRY_MIN_S

STAGGER_S: Final = 0.005
STAGGER_MAX_S: Final = 0.25
FORGIVE_TTLS: Final = 2.0
FORGIVE_EXTRA_S: Final = 1.0


class Succession:
    """See the module.

    Arguments:
        control, config, cache, presence: of the node.
    """

    def __init__(self, control: Control, config: RunConfig, cache: RecordCache, presence: Presence) -> None:
        self._control = control
        self._config = config
        self._cache = cache
        self._presence = presence
        self._keys = RunKeys(config.run_id)
        self._holder: KeyValue | None = None
        self._office: Office | None = None
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._taking: asyncio.Task[None] | None = None
        self._forgive_until = -math.inf
        self._closed = False

    @property
    def is_arbiter(self) -> bool:
        """Whether this node decides."""
        return self._office is not None

    def held_by(self, item: KeyValue | None) -> None:
        """The ``arbiter`` key is this now; None: it is gone."""
        self._holder = item
        if self._closed:
            return
        if not self._is_mine(item):
            self._resign()
        elif self._office is None or self._office.revision != item.mod_revision:  # type: ignore[union-attr]
            self._resign()
            self._office = self._open_office(item.mod_revision)  # type: ignore[union-attr]
        if item is not None:
            self._forget()
        elif self._timer is None and (self._taking is None or self._taking.done()):
            self._timer = self._loop.call_later(self._stagger_s(), self._succeed)

    def lost_lease(self) -> None:
        """The office, if this node had it, is gone with its lease."""
        self._resign()

    def look(self) -> None:
        """The run's record has changed."""
        if self._office is not None:
            self._office.look()

    def forgive(self) -> None:
        """The store was out of reach: give others the time to register again that this node had."""
        grant = self._presence.grant
        ttl_s = grant.ttl_s if grant is not None else self._config.lease_ttl_s
        self._forgive_until = self._loop.time() + FORGIVE_TTLS * ttl_s + FORGIVE_EXTRA_S
        if self._office is not None:
            self._office.forgive(self._forgive_until)

    def close(self) -> None:
        """Take no office any more."""
        self._closed = True
        self._resign()
        self._forget()
        if self._taking is not None:
            self._taking.cancel()

    def _is_mine(self, item: KeyValue | None) -> bool:
        grant = self._presence.grant
        return item is not None and grant is not None and item.lease == grant.id

    def _open_office(self, revision: int) -> Office:
        return Office(self._control, self._config, self._cache, revision, self._forgive_until)

    def _resign(self) -> None:
        if self._office is not None:
            self._office.close()
            self._office = None

    def _forget(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stagger_s(self) -> float:
        current = self._cache.round
        members = current.members if current is not None else ()
        own_id = self._presence.node.id
        place = next((index for index, member in enumerate(members) if member.id == own_id), len(members))
        return min(place * STAGGER_S, STAGGER_MAX_S)

    def _succeed(self) -> None:
        self._timer = None
        self._taking = self._loop.create_task(self._take_office())

    async def _take_office(self) -> None:
        keys, presence = self._keys, self._presence
        own_id = presence.node.id
        wait_s = RETRY_MIN_S
        while self._holder is None:
            await presence.registered.wait()
            grant = presence.grant
            conditions = [version(keys.arbiter) == 0, version(keys.node(own_id)) > 0]
            try:
                if grant is not None:
                    put = [Put(keys.arbiter, own_id, lease=grant.id)]
                    if (await self._control.txn(conditions, put)).succeeded:
                        return  # the watch brings it, and so begins the office
            except LeaseNotFoundError:
                if grant is not None:
                    presence.lose(grant.id)
            except StatusError:
                pass  # the store is out of reach; somebody may have been faster meanwhile
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, RETRY_MAX_S)
