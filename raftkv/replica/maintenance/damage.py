"""Damage in this member's own database: how it is found, and the member's reaction.

    scrub, copies for other members, Defragment, Snapshot, hashes, reads, watches --> Damage.found(error)
        this member leads                    transfers leadership
        the others are a quorum without it   stops, with one line that names the member and the file
        they are not                         continues: votes, acknowledges, serves all undamaged data; checks again

Damage found while applying an entry stops the member at once: its state would differ from that of the others. The
reasons are in docs/contributing/decisions/0013-damaged-database.md.

The scrub reads the whole database through the page cache: one pass per hour, on a thread that works ``SHARE`` of the
time. A read transaction is open meanwhile, so a pass ends early when the database grows much.
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
"""Seconds from the end of a pass to the next; the first begins earlier, at a different time on each member."""
SHARE: Final = 0.05
"""Fraction of the time in which a pass works, including its waits for the disk."""
GROWTH_MAX_BYTES: Final = 256 << 20
"""Maximum growth of the database while a pass has its read transaction open."""
STEADY_S: Final = 10.0
"""Seconds for which the others must have been connected to count as reliable."""
LOOK_S: Final = 5.0
"""Seconds between two checks whether the others can do without this member."""


class GivenUpError(StorageError):
    """A pass that ended early without finding damage."""


class Damage(Collector):
    """Known damage, and the reaction to it.

    Arguments:
        node: node of the member.
        where: the file and the member, for the operator who must check the disk.
        connected_since: returns the loop time at which a peer was connected; ``None`` while it is not.
        stop: stops the member with an error.
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
        """Number of passes of the scrub, by result."""
        self.clean_at_s = 0.0
        """End time of the last pass that found nothing, in seconds since 1970."""

    def collect(self) -> Iterator[Metric]:
        """Yield whether there is damage, and the results of the scrub."""
        text = "Whether this member found its own database damaged: look at its disk, replace the member."
        yield GaugeMetricFamily("raftkv_database_damaged", text, float(self._error is not None))
        passes = CounterMetricFamily("raftkv_scrub_passes", "Passes over the whole database.", labels=["result"])
        for result in ("clean", "damaged", "given up"):
            passes.add_metric([result], float(self.passes[result]))
        yield passes
        text = "When the last clean pass over the whole database ended, in seconds since 1970; 0: none has."
        yield GaugeMetricFamily("raftkv_scrub_clean_timestamp_seconds", text, self.clean_at_s)

    def found(self, error: CorruptionError) -> None:
        """Handle damage; returns at once, the reaction runs in the background."""
        known = self._error
        self._error = CorruptionError(f"the database {self._where} is damaged: {error}")
        if known is None or str(known) != str(self._error):
            _log.critical("%s", self._error)
        if self._settling is None or self._settling.done():
            self._settling = asyncio.get_running_loop().create_task(self._settle())

    def none_found(self) -> None:
        """Record that the whole database was read without damage: earlier damage is gone."""
        if self._error is not None:
            _log.warning("the damaged entries of the database were compacted away: the database is sound again")
            self._error = None
        self.passes["clean"] += 1
        self.clean_at_s = time.time()

    async def _settle(self) -> None:
        """Transfer leadership, and stop as soon as the others can do without this member."""
        is_told = False
        while self._error is not None and not self._node.stopped:
            if self._has_heir():
                await hand_over(self._node, self._connected_since)
            # If two members find damage at once, for example in a hash that all compute, the second sees the first
            # stop.
            await asyncio.sleep(random.uniform(0.0, LOOK_S))
            if self._error is not None and self._is_dispensable():
                self._stop(self._error)
                return
            if not is_told:
                is_told = True
                _log.error(
                    "this member keeps running on its damaged database, because the others have no quorum without it: "
                    "it refuses reads of damaged keys; start the others, or add a member (raftkv join), and then "
                    "replace this one"
                )
            await asyncio.sleep(LOOK_S)

    def _has_heir(self) -> bool:
        """Whether a voter has all committed entries: a voter that lacks some may need the damaged data."""
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
        """Stop deciding."""
        if self._settling is not None:
            self._settling.cancel()


def is_quorum(members: set[int], conf: ConfState) -> bool:
    """Return whether some members can elect a leader and commit without the others.

    Arguments:
        members: ids of the members.
        conf: configuration of the cluster; in a joint one both majorities are needed.
    """
    majorities = [voters for voters in (conf.voters, conf.voters_outgoing) if voters]
    return all(2 * len(members.intersection(voters)) > len(voters) for voters in majorities)


class Scrub:
    """Looks for damage before a reader needs the damaged data.

    Arguments:
        store: store of the member.
        damage: notified of findings.
    """

    def __init__(self, store: Store, damage: Damage) -> None:
        self._store = store
        self._damage = damage

    async def run(self) -> None:
        """Scrub periodically until cancelled."""
        await asyncio.sleep(PASS_EVERY_S * random.uniform(0.1, 1.0))
        while True:
            await self.pass_once()
            await asyncio.sleep(PASS_EVERY_S)

    async def pass_once(self) -> None:
        """Read the whole database once, and report the result."""
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
            _log.info("aborted a scrub of the database: %s", error)
        else:
            took_s = time.perf_counter() - began_s
            self._damage.none_found()
            _log.info("scrubbed the database: the checksums of %d bytes are right, in %.1f s", size_bytes, took_s)

    def _rest(self, given_up: Event, size_before_bytes: int, worked_s: float) -> None:
        """Pause in proportion to the work, and end the pass if others need the space."""
        backend = self._store.backend
        if given_up.wait(worked_s * (1 / SHARE - 1)):
            raise GivenUpError("the member stops")
        if backend.size_bytes - size_before_bytes > GROWTH_MAX_BYTES:
            raise GivenUpError("the database grew by much meanwhile")
        if isinstance(self._store.space_error, MapFullError):
            raise GivenUpError("the map of the database has to grow")
