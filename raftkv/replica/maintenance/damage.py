"""Damage in this member's own database: who looks for it, and what the member does about it.

    scrub, copies for other members, Defragment, Snapshot, hashes, reads, watches --> Damage.found(error)
        this member leads                    hands leadership over
        the others are a quorum without it   stops, with one line that names the member and the file
        they are not                         goes on: votes, acknowledges, serves all but what is damaged; looks again

Damage that applying an entry meets stops the member at once: its state would differ from that of the others. Why it is
like this: docs/contributing/decisions/0013-damaged-database.md.

The scrub reads the database from end to end, as the system gives it: a pass an hour, on a thread that works ``SHARE``
of the time. A state is pinned meanwhile, so a pass ends early when the database grows by much.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from threading import Event
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from raftkv.errors import CorruptionError, MapFullError, StorageError
from raftkv.raft.types import NONE, ConfState
from raftkv.replica.maintenance.hashes import scan
from raftkv.replica.node.leadership import hand_over
from raftkv.replica.node.node import Node
from raftkv.storage.mvcc import Store

_log = logging.getLogger(__name__)

PASS_EVERY_S: Final = 3600.0
"""From the end of a pass to the next; the first begins after a part of it, another on each member."""
SHARE: Final = 0.05
"""Part of the time in which a pass works, its waits for the disk included: the rest is for others."""
GROWTH_MAX_BYTES: Final = 256 << 20
"""How much the database may grow while a pass has a state pinned."""
STEADY_S: Final = 10.0
"""How long the others must have been connected to be counted on."""
LOOK_S: Final = 5.0
"""Between two looks at whether the others can do without this member."""


class GivenUpError(StorageError):
    """A pass that ended early, and found nothing."""


class Damage(Collector):
    """Known damage, and the reaction to it.

    Arguments:
        node: of the member.
        where: the file and the member, for the operator who has to look at the disk.
        connected_since: loop time since when a peer is connected, None while it is not.
        stop: ends the member with an error.
    """

    def __init__(
        self,
        node: Node,
        where: str,
        connected_since: Callable[[int], float | None],
        stop: Callable[[CorruptionError], None],
    ) -> None:
        self._node = node
        self._where = where
        self._connected_since = connected_since
        self._stop = stop
        self._error: CorruptionError | None = None
        self._settling: asyncio.Task[None] | None = None
        self.passes: Counter[str] = Counter()
        """Passes of the scrub, by how they ended."""
        self.clean_at_s = 0.0
        """When the last one ended that found nothing, in seconds since 1970."""

    def collect(self) -> Iterator[Metric]:
        """Whether there is damage, and what the scrub did."""
        text = "Whether this member found its own database damaged: look at its disk, replace the member."
        yield GaugeMetricFamily("raftkv_database_damaged", text, float(self._error is not None))
        passes = CounterMetricFamily("raftkv_scrub_passes", "Passes over the whole database.", labels=["result"])
        for result in ("clean", "damaged", "given up"):
            passes.add_metric([result], float(self.passes[result]))
        yield passes
        text = "When the last clean pass over the whole database ended, in seconds since 1970; 0: none has."
        yield GaugeMetricFamily("raftkv_scrub_clean_timestamp_seconds", text, self.clean_at_s)

    def found(self, error: CorruptionError) -> None:
        """Take note of damage, and do something about it; at once, and beside the loop's other work."""
        known = self._error
        self._error = CorruptionError(f"the database {self._where} is damaged: {error}")
        if known is None or str(known) != str(self._error):
            _log.critical("%s", self._error)
        if self._settling is None or self._settling.done():
            self._settling = asyncio.get_running_loop().create_task(self._settle())

    def none_found(self) -> None:
        """All of the database was read, and is what was written: what was damaged is gone."""
        if self._error is not None:
            _log.warning("nothing in the database is damaged any more: what was has been compacted away")
            self._error = None
        self.passes["clean"] += 1
        self.clean_at_s = time.time()

    async def _settle(self) -> None:
        """Hand leadership over, and stop as soon as the others can do without this member."""
        is_told = False
        while self._error is not None and not self._node.stopped:
            if self._has_heir():
                await hand_over(self._node, self._connected_since)
            # Of two members that find damage at once, as by a hash that all make, the second sees that the first left.
            await asyncio.sleep(random.uniform(0.0, LOOK_S))
            if self._error is not None and self._is_dispensable():
                self._stop(self._error)
                return
            if not is_told:
                is_told = True
                _log.error(
                    "this member goes on with its damaged database, because the others are no quorum without it: "
                    "reads of what is damaged are refused; bring the others back, or add a member (raftkv join)"
                )
            await asyncio.sleep(LOOK_S)

    def _has_heir(self) -> bool:
        """Whether a voter has all that is committed: one that lacks some may need what is damaged."""
        node = self._node
        voters = (peer for peer in node.conf_state.voters if self._connected_since(peer) is not None)
        return any(node.has_log(peer, node.committed) for peer in voters)

    def _is_dispensable(self) -> bool:
        node, now = self._node, asyncio.get_running_loop().time()
        own_id = node.settings.member_id
        if node.leader in (NONE, own_id):
            return False
        steady = {
            peer
            for peer in (*node.conf_state.voters, *node.conf_state.voters_outgoing)
            if peer != own_id and (since := self._connected_since(peer)) is not None and since <= now - STEADY_S
        }
        return is_quorum(steady, node.conf_state)

    def close(self) -> None:
        """Decide nothing any more."""
        if self._settling is not None:
            self._settling.cancel()


def is_quorum(members: set[int], conf: ConfState) -> bool:
    """Return whether some members can elect a leader and commit without the others.

    Arguments:
        members: their ids.
        conf: of the cluster; in a joint one both majorities are needed.
    """
    majorities = [voters for voters in (conf.voters, conf.voters_outgoing) if voters]
    return all(2 * len(members.intersection(voters)) > len(voters) for voters in majorities)


class Scrub:
    """Looks for damage before a reader needs the damaged data.

    Arguments:
        store: of the member.
        damage: hears of what is found.
    """

    def __init__(self, store: Store, damage: Damage) -> None:
        self._store = store
        self._damage = damage

    async def run(self) -> None:
        """Scrub by the clock until cancelled."""
        await asyncio.sleep(PASS_EVERY_S * random.uniform(0.1, 1.0))
        while True:
            await self.pass_once()
            await asyncio.sleep(PASS_EVERY_S)

    async def pass_once(self) -> None:
        """Read the whole database once, and say what was found."""
        backend = self._store.backend
        size_bytes = backend.size_bytes
        began_s = time.perf_counter()
        try:
            await scan(lambda given_up: backend.check(partial(self._rest, given_up, size_bytes)))
        except CorruptionError as error:
            self._damage.passes["damaged"] += 1
            self._damage.found(error)
        except StorageError as error:
            self._damage.passes["given up"] += 1
            _log.info("a scrub of the database was given up: %s", error)
        else:
            took_s = time.perf_counter() - began_s
            self._damage.none_found()
            _log.info("scrubbed the database: %d bytes are what was written, in %.1f s", size_bytes, took_s)

    def _rest(self, given_up: Event, size_before_bytes: int, worked_s: float) -> None:
        """Rest in proportion to what was worked, and give way to who needs room."""
        backend = self._store.backend
        if given_up.wait(worked_s * (1 / SHARE - 1)):
            raise GivenUpError("the member stops")
        if backend.size_bytes - size_before_bytes > GROWTH_MAX_BYTES:
            raise GivenUpError("the database grew by much meanwhile")
        if isinstance(self._store.space_error, MapFullError):
            raise GivenUpError("the map of the database has to grow")
