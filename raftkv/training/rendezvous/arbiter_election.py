"""The election of the arbiter, as one node sees it: whoever holds the ``arbiter`` key under its lease decides.

Owns the node's view of that key, and the ``ArbiterDriver`` while the key is this node's. When the key has gone, with
the lease of its holder, members try to take it in rank order, a few milliseconds apart, so that a thousand nodes do not
ask at once; whoever comes first has it. An example, in which the arbiter a is killed:

    a (rank 0)  holds arbiter ----X killed
    store                         | lease of a ends: arbiter and node/a are deleted
    b (rank 1)                    | sees it, waits 5 ms ----> put arbiter if absent: succeeds ---> decides
    c (rank 2)                    | sees it, waits 10 ms, sees arbiter = b: stands back
    b, as arbiter                                               lists node/, fault/: a is lost ---> state = broken
    b, c                                                        stop their workers, write want = 2
    b, as arbiter                                               round = 2 (b, c), state = running

A node that holds the key under its present lease is the arbiter, and nobody else is.
"""

from __future__ import annotations

import asyncio
import math
from typing import Final

from raftkv.client.control.control import RETRY_MAX_S, RETRY_MIN_S, Control
from raftkv.client.kv.operations import Put, version
from raftkv.client.values import KeyValue
from raftkv.errors import LeaseNotFoundError, StatusError
from raftkv.training.config import RunConfig
from raftkv.training.keys import RunKeys
from raftkv.training.rendezvous.arbiter_driver import ArbiterDriver
from raftkv.training.rendezvous.record_cache import RecordCache
from raftkv.training.rendezvous.registration import Registration

DELAY_S: Final = 0.005
DELAY_MAX_S: Final = 0.25
FORGIVE_TTLS: Final = 2.0
FORGIVE_EXTRA_S: Final = 1.0


class ArbiterElection:
    """One node's candidacy for the arbiter.

    Arguments:
        control, config, cache, registration: of the node.
    """

    def __init__(self, control: Control, config: RunConfig, cache: RecordCache, registration: Registration) -> None:
        self._control = control
        self._config = config
        self._cache = cache
        self._registration = registration
        self._keys = RunKeys(config.run_id)
        self._holder: KeyValue | None = None
        self._driver: ArbiterDriver | None = None
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._taking: asyncio.Task[None] | None = None
        self._forgive_until = -math.inf
        self._closed = False

    @property
    def is_arbiter(self) -> bool:
        """Whether this node decides."""
        return self._driver is not None

    def on_arbiter(self, item: KeyValue | None) -> None:
        """Take notice of the ``arbiter`` key as it is now; None: it is gone."""
        self._holder = item
        if self._closed:
            return
        if item is None or not self._is_mine(item):
            self._resign()
        elif self._driver is None or self._driver.revision != item.mod_revision:
            self._resign()
            self._driver = self._drive(item.mod_revision)
        if item is not None:
            self._forget()
        elif self._timer is None and (self._taking is None or self._taking.done()):
            self._timer = self._loop.call_later(self._delay_s(), self._stand)

    def lost_lease(self) -> None:
        """Stop deciding: the ``arbiter`` key, if it was this node's, is gone with its lease."""
        self._resign()

    def look(self) -> None:
        """Let the arbiter decide again: the run's record has changed."""
        if self._driver is not None:
            self._driver.look()

    def forgive(self) -> None:
        """Give others the time to register again that this node had: the store was out of reach."""
        grant = self._registration.grant
        ttl_s = grant.ttl_s if grant is not None else self._config.lease_ttl_s
        self._forgive_until = self._loop.time() + FORGIVE_TTLS * ttl_s + FORGIVE_EXTRA_S
        if self._driver is not None:
            self._driver.forgive(self._forgive_until)

    def close(self) -> None:
        """Stand for election no more."""
        self._closed = True
        self._resign()
        self._forget()
        if self._taking is not None:
            self._taking.cancel()

    def _is_mine(self, item: KeyValue) -> bool:
        grant = self._registration.grant
        return grant is not None and item.lease == grant.id

    def _drive(self, revision: int) -> ArbiterDriver:
        return ArbiterDriver(self._control, self._config, self._cache, revision, self._forgive_until)

    def _resign(self) -> None:
        if self._driver is not None:
            self._driver.close()
            self._driver = None

    def _forget(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _delay_s(self) -> float:
        current = self._cache.round
        members = current.members if current is not None else ()
        own_id = self._registration.node.id
        place = next((index for index, member in enumerate(members) if member.id == own_id), len(members))
        return min(place * DELAY_S, DELAY_MAX_S)

    def _stand(self) -> None:
        self._timer = None
        self._taking = self._loop.create_task(self._campaign())

    async def _campaign(self) -> None:
        keys, registration = self._keys, self._registration
        own_id = registration.node.id
        wait_s = RETRY_MIN_S
        while self._holder is None:
            await registration.registered.wait()
            grant = registration.grant
            conditions = [version(keys.arbiter) == 0, version(keys.node(own_id)) > 0]
            try:
                if grant is not None:
                    put = [Put(keys.arbiter, own_id, lease=grant.id)]
                    if (await self._control.txn(conditions, put)).succeeded:
                        return  # the watch brings the key, and this node begins to decide
            except LeaseNotFoundError:
                if grant is not None:
                    registration.lose(grant.id)
            except StatusError:
                pass  # the store is out of reach; somebody may have been faster meanwhile
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, RETRY_MAX_S)
