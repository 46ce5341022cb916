"""The way from a node to the cluster, and ``Control`` over it.

Owns delays, losses and partitions. A request can be lost, its answer can be lost, and it can arrive after its sender
has given up: the sender gets ``UNAVAILABLE`` each time and does not know which. What is promised all the same: an
answer belongs to its question, a watch delivers every change once and in order, and a lease is reported lost only on
the cluster's word.

    control = SimControl(link)
    result = await control.txn([version("a") == 0], [Put("a", b"1")])
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from raftkv.client.control import Grant
from raftkv.client.errors import UnknownStatus
from raftkv.client.operations import Compare, Operation
from raftkv.client.scope import Text, to_bytes
from raftkv.client.values import Event, RangeResult, TxnResult
from raftkv.errors import UNAVAILABLE, CompactedError, StatusError
from tests.virtual_loop import NodeLoop

from .cluster import Cluster
from .store import Store

RETRY_S = 0.2
"""How often a client knocks where no member answers."""


def unavailable(definite: bool) -> StatusError:
    """The error of a client that gets no answer."""
    return UnknownStatus(UNAVAILABLE, "simulated: no answer", definite)


@dataclass(frozen=True, slots=True)
class Weather:
    """How good the network is.

    Attributes:
        delay_s: shortest and longest of one way.
        loss: share of the requests that fail although nothing is broken.
        late: share of those that are applied long after their sender has given up.
    """

    delay_s: tuple[float, float] = (0.0005, 0.003)
    loss: float = 0.0
    late: float = 0.0


class Link:
    """One node's way to the cluster.

    Attributes:
        cut: nothing passes.
        breaks: how often its connection has broken.
        calls: how many of each kind the node made.
        received_bytes: of keys and values, in answers and from watches.
        leases: what its connection keeps alive.
    """

    def __init__(self, loop: NodeLoop, cluster: Cluster, source: random.Random, weather: Weather) -> None:
        self.loop = loop
        self.cluster = cluster
        self.random = source
        self.weather = weather
        self.cut = False
        self.broken_until = 0.0
        self.breaks = 0
        self.calls: Counter[str] = Counter()
        self.received_bytes = 0
        self.grants: dict[int, SimGrant] = {}

    @property
    def open(self) -> bool:
        """Something passes now."""
        return not self.cut and self.cluster.up and self.cluster.scheduler.now >= self.broken_until

    @property
    def connection(self) -> int:
        """Number of the present connection: another after each break, on either side."""
        return self.breaks + self.cluster.breaks

    def delay_s(self) -> float:
        """How long the next message takes."""
        return self.random.uniform(*self.weather.delay_s)

    def reset(self) -> None:
        """The connection breaks; the client makes another."""
        self.hang_up()
        self.breaks += 1
        pause_s = self.random.uniform(0.0, 0.25)
        self.broken_until = self.cluster.scheduler.now + pause_s
        self.cluster.scheduler.after(pause_s, self._reconnected)

    def hang_up(self) -> None:
        """The cluster sees the connection end, if anything passes."""
        if not self.cut:
            for lease_id in list(self.grants):
                self.cluster.disconnect(lease_id)

    def _reconnected(self) -> None:
        for grant in list(self.grants.values()):
            self.loop.call_soon(grant.beat_now)


class Request:
    """One call under way."""

    def __init__(self, link: Link, apply: Callable[[], Any]) -> None:
        self._link = link
        self._apply = apply
        self._future = link.loop.create_future()

    async def send(self) -> Any:
        """Wait for its end.

        Raises:
            StatusError: refused, or no answer.
        """
        link, after = self._link, self._link.cluster.scheduler.after
        fate = link.random.random()
        weather = link.weather
        if fate < weather.loss * weather.late:
            after(link.random.uniform(0.5, 4.0), self._arrive)
            self._fail_soon()
        elif fate < weather.loss * (1 + weather.late) / 2:
            self._fail_soon()
        elif fate < weather.loss:
            after(link.delay_s(), self._arrive)
            self._fail_soon()
        else:
            after(link.delay_s(), self._arrive)
        return await self._future

    def _arrive(self) -> None:
        link = self._link
        if not link.open and not link.loop.crashed:
            self._fail_soon()
            return
        if link.cluster.electing:
            # Some give up before the election is over; what they asked for happens all the same.
            if link.random.random() < 0.3:
                self._fail_soon()
            link.cluster.when_led(self._execute)
            return
        self._execute()

    def _execute(self) -> None:
        try:
            answer = self._apply()
        except StatusError as error:
            answer = error
        self._link.cluster.scheduler.after(self._link.delay_s(), self._answer, answer)

    def _answer(self, answer: Any) -> None:
        if self._link.open:
            self._settle(answer)
        else:
            self._fail_soon()

    def _fail_soon(self) -> None:
        wait_s = self._link.random.uniform(0.0, 1.0)
        self._link.cluster.scheduler.after(wait_s, self._settle, unavailable(definite=False))

    def _settle(self, answer: Any) -> None:
        self._link.loop.call_soon(self._resolve, answer)

    def _resolve(self, answer: Any) -> None:
        if self._future.done():
            return
        if isinstance(answer, Exception):
            self._future.set_exception(answer)
        else:
            self._future.set_result(answer)


class SimGrant:
    """A lease that a node keeps alive."""

    def __init__(self, link: Link, lease_id: int, ttl_s: int, on_lost: Callable[[], None]) -> None:
        self.id = lease_id
        self.ttl_s = ttl_s
        self._link = link
        self._on_lost = on_lost
        self._ended = False
        self._confirmed_at = link.loop.time()
        link.grants[lease_id] = self
        self._timer: asyncio.TimerHandle | None = link.loop.call_later(ttl_s / 3, self.beat)

    @property
    def silent_s(self) -> float:
        """Seconds since the cluster last confirmed it."""
        return self._link.loop.time() - self._confirmed_at

    def stop(self) -> None:
        """Keep it alive no longer."""
        self._ended = True
        self._link.grants.pop(self.id, None)
        if self._timer is not None:
            self._timer.cancel()

    def beat_now(self) -> None:
        """Send a keep-alive out of turn."""
        if self._timer is not None:
            self._timer.cancel()
        self.beat()

    def beat(self) -> None:
        """Send a keep-alive, and again in time."""
        if self._ended:
            return
        link = self._link
        wait_s = self.ttl_s / 3 if link.open else RETRY_S
        self._timer = link.loop.call_later(wait_s, self.beat)
        if link.open:
            link.cluster.scheduler.after(link.delay_s(), self._arrive)

    def _arrive(self) -> None:
        link = self._link
        if link.open and not link.cluster.electing:
            alive = link.cluster.keep_alive(self.id)
            link.cluster.scheduler.after(link.delay_s(), self._answer, alive)

    def _answer(self, alive: bool) -> None:
        if self._link.open:
            self._link.loop.call_soon(self._answered, alive)

    def _answered(self, alive: bool) -> None:
        if alive:
            self._confirmed_at = self._link.loop.time()
        elif not self._ended:
            self.stop()
            self._on_lost()


class SimWatch:
    """A watch: at most one response is under way; what comes meanwhile is in the next."""

    def __init__(
        self,
        link: Link,
        interval: tuple[bytes, bytes],
        start_revision: int,
        on_events: Callable[[int, Sequence[Event]], None],
        on_lost: Callable[[Exception], None],
    ) -> None:
        self._link = link
        self._interval = interval
        self._start, self._end = interval
        self._next = self._known = start_revision
        self._connection = -1
        self._on_events = on_events
        self._on_lost = on_lost
        self._busy = True
        self._ended = False
        link.cluster.store.on_commit.append(self._on_commit)
        link.cluster.scheduler.after(link.delay_s(), self._serve)

    def cancel(self) -> None:
        """No more."""
        if not self._ended:
            self._ended = True
            self._link.cluster.store.on_commit.remove(self._on_commit)

    def _serve(self) -> None:
        link = self._link
        if self._ended or link.loop.crashed:
            self.cancel()
            return
        if not link.open:
            link.cluster.scheduler.after(RETRY_S * link.random.random() + 0.01, self._serve)
            return
        try:
            revision, events = self._read(link.cluster.store)
        except CompactedError as error:
            link.loop.call_soon(self._lose, error)
            return
        if not events:
            self._busy = False
            return
        if link.random.random() < 0.3:
            revision = events[0].kv.mod_revision
            events = [event for event in events if event.kv.mod_revision == revision]
        link.cluster.scheduler.after(link.delay_s(), self._arrive, revision, events)

    def _read(self, store: Store) -> tuple[int, list[Event]]:
        """What comes next. A new connection begins where the node has come to; the old one had come further."""
        if self._connection != self._link.connection:
            self._connection = self._link.connection
            self._next = self._known = self._known or store.revision + 1
        if self._next > store.revision:
            return store.revision, []
        events = store.events(*self._interval, self._next)
        self._next = self._next if events else store.revision + 1
        return store.revision, events

    def _on_commit(self, revision: int, events: list[Event]) -> None:
        is_synced = not self._busy and self._connection == self._link.connection and self._link.open
        if is_synced and not any(self._start <= event.kv.key < self._end for event in events):
            self._next = revision + 1
        else:
            self._wake()

    def _wake(self) -> None:
        if not self._busy:
            self._busy = True
            self._link.cluster.scheduler.after(self._link.delay_s(), self._serve)

    def _arrive(self, revision: int, events: list[Event]) -> None:
        if self._link.open and self._connection == self._link.connection:
            self._next = self._known = revision + 1
            self._link.loop.call_soon(self._deliver, revision, events)
        self._serve()

    def _deliver(self, revision: int, events: list[Event]) -> None:
        if not self._ended:
            self._link.received_bytes += sum(len(event.kv.key) + len(event.kv.value) for event in events)
            self._on_events(revision, events)

    def _lose(self, error: Exception) -> None:
        if not self._ended:
            self.cancel()
            self._on_lost(error)


class SimControl:
    """``raftkv.client.control.Control`` over a link."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def grant(self, ttl_s: int, grace_s: float, on_lost: Callable[[], None]) -> SimGrant:
        """Implement ``Control.grant``."""
        cluster = self._link.cluster
        lease_id, granted_s = await self._call("grant", lambda: cluster.grant(ttl_s, grace_s))
        return SimGrant(self._link, lease_id, granted_s, on_lost)

    async def grant_fixed(self, ttl_s: int) -> int:
        """Implement ``Control.grant_fixed``."""
        lease_id, _ = await self._call("grant_fixed", lambda: self._link.cluster.grant(ttl_s, 0.0))
        return int(lease_id)

    async def end(self, grant: Grant, *, revoke: bool) -> None:
        """Implement ``Control.end``."""
        if grant.id in self._link.grants:
            self._link.grants[grant.id].stop()
        if revoke:
            await self._call("revoke", lambda: self._link.cluster.revoke(grant.id))

    async def txn(
        self, compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
    ) -> TxnResult:
        """Implement ``Control.txn``."""
        store = self._link.cluster.store
        result: TxnResult = await self._call("txn", lambda: store.txn(compares, then, otherwise))
        pages = [page for page in result.results if isinstance(page, RangeResult)]
        self._link.received_bytes += sum(len(item.key) + len(item.value) for page in pages for item in page)
        return result

    def watch(
        self,
        key: Text,
        end: Text,
        start_revision: int,
        on_events: Callable[[int, Sequence[Event]], None],
        on_lost: Callable[[Exception], None],
        *,
        deletes: bool = True,
        cluster_id: int = 0,
    ) -> Callable[[], None]:
        """Implement ``Control.watch``; all simulated programs want deletions."""
        self._link.calls["watch"] += 1
        interval = to_bytes(key), to_bytes(end) or to_bytes(key) + b"\0"
        return SimWatch(self._link, interval, start_revision, on_events, on_lost).cancel

    async def _call(self, kind: str, apply: Callable[[], Any]) -> Any:
        link = self._link
        link.calls[kind] += 1
        give_up_at = link.loop.time() + link.random.uniform(0.3, 5.0)
        while not link.open:
            # Nothing was sent: the failure is definite, but a client does not always know that.
            if link.loop.time() >= give_up_at:
                raise unavailable(definite=link.random.random() < 0.5)
            await asyncio.sleep(RETRY_S * link.random.uniform(0.5, 1.0))
        return await Request(link, apply).send()
