"""One torchft job in one daemon: announces its replicas, decides quorums if it is the arbiter, answers managers.

::

    replica --Quorum--> daemon --member/...--> arbiter --head/quorum--> every daemon --> replicas

Any number of daemons serve a job; one of them, the *arbiter*, decides (``torchft.rules``). The others write the asks of
their replicas into leased keys of the replicas. The arbiter writes no keys for its own replicas, and writes nothing at
all if all members are its own and the quorum is unchanged: then one read confirms that it is still the arbiter and that
the quorum is still the last one. So a step costs no commit with one daemon, and two in a row with several.

Invariants:

1. No answer is sent before a write or read of this decision has proved, with a majority of the store's members, that
   this daemon is the arbiter and knows the last quorum.
2. An ask is answered by one quorum only: it is never decided again once a stored quorum, or an answer, had it.
3. Errors of the store reach no replica: the turn is repeated until it works, with the store as it is then.
4. Ids never go back: after a restore from a backup, which knows an earlier quorum or none, the next one is far above
   all that this daemon has seen, and that the store knows: others may have given out more since. So it is when the
   quorum was deleted. Only a stranger's record with the last id makes them begin again, at a random one.
5. A daemon that does not decide, whose arbiter key another client holds, takes it over: a TTL or two after the key was
   written each daemon looks, once, whether the turn of the daemon that it names is under the same lease.

Not here: connections and calls (``lighthouse``), timeouts of replicas (``rules``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from zlib import crc32

from raftkv.client.control import ClientControl, Reflector, below
from raftkv.client.errors import is_client_closed
from raftkv.client.lease import Lease
from raftkv.client.library import Client
from raftkv.client.operations import Compare, Operation, delete, get, lease_of, mod_revision, put
from raftkv.client.records import RecordError, read
from raftkv.client.rpc.retry import Backoff, is_transient
from raftkv.client.values import Event, KeyValue, TxnResult
from raftkv.errors import RaftKVError, StatusError
from raftkv.integrations.torchft.rules import (
    QUORUM_ID_MAX,
    Answer,
    Ask,
    Decision,
    JobKeys,
    MemberRecord,
    QuorumRecord,
    Roster,
    Rules,
    View,
    decide,
    make_ask,
)
from raftkv.rpc.shares import Identity

# -- lease ----------------------------------------------------------------------------------------------------------
#
# The single lease of a lighthouse daemon: all keys that show that the daemon is alive end with it.
#
# It outlives an outage of the whole store, and ends within ``grace_s`` of the daemon's death. When the store says that
# it has ended, a new one is granted; a changed ``number`` shows users that keys attached to the old lease were deleted.


class DaemonLease:
    """The lease of this daemon's keys.

    Attributes:
        lease: current lease; None: none at the moment.
        number: increases with every lease.
        ttl_s: of each lease.
    """

    def __init__(self, kv: Client, ttl_s: float, grace_s: float) -> None:
        self.lease: Lease | None = None
        self.number = 0
        self.ttl_s = ttl_s
        self._kv = kv
        self._grace_s = grace_s
        self._listeners: list[Callable[[], None]] = []

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call back, on the loop, whenever a lease was granted or lost."""
        self._listeners.append(callback)

    @property
    def cluster(self) -> str:
        """Return the id of the cluster that has granted it, as a text; empty: there is none now, or it did not say."""
        number = 0 if self.lease is None else self.lease.cluster_id
        return f"{number:x}" if number else ""

    async def run(self) -> None:
        """Hold a lease until cancelled."""
        backoff = Backoff(max_s=RETRY_MAX_S)
        told = ""
        while True:
            lease = self._kv.lease(self.ttl_s, disconnect_grace_s=self._grace_s, patient=True, interrupt=False)
            try:
                await lease.grant()
            except RaftKVError as error:
                if str(error) != told:
                    told = str(error)
                    _log.warning("cannot get a lease, retrying: %s", told)
                await backoff.wait()
                continue
            backoff.reset()
            told = ""
            self._set(lease)
            await lease.lost.wait()
            _log.warning("lost the lease; registering again")
            self._set(None)

    async def end(self) -> None:
        """Give it back, so that others need not wait for its end."""
        lease, self.lease = self.lease, None
        if lease is not None:
            try:
                await lease.revoke(timeout_s=1.0)
            except RaftKVError as error:
                _log.debug("the lease was not revoked: %s", error)

    def _set(self, lease: Lease | None) -> None:
        self.lease = lease
        self.number += lease is not None
        for callback in self._listeners:
            callback()


RETRY_MAX_S: Final = 0.25
OPERATIONS_MAX: Final = 100
"""Members that one txn announces."""
CALL_TIMEOUT_S: Final = 1.0
"""Time limit of one attempt, because a call to a leader that died is never answered. All calls can be repeated."""
NAME_BYTES_MAX: Final = 4096
"""No daemon's id is longer."""
ID_LEAP: Final = 1 << 32
"""More ids than a job can use between a backup and its restore. Ids have 63 bits."""
_ABSENT: Final = Ask("", "absent")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Timing:
    """Timeouts of replicas, in seconds.

    Attributes:
        heartbeat_timeout_s: time of silence after which a replica counts as lost.
        disconnect_grace_s: time after which a replica whose connections have closed counts as lost.
    """

    heartbeat_timeout_s: float = 5.0
    disconnect_grace_s: float = 0.05


class Job:
    """One torchft job in this daemon.

    Arguments:
        name: name of the job.
        kv: a client, not a view of one.
        daemon_id: id of this start of the daemon, without slashes.
        lease: lease of the daemon.
        rules, timing: settings of the daemon.
        started_s: when the daemon started, by the loop's clock.

    Attributes:
        decision: the last one, for people.
        record: the last quorum that was read from the store; None: there was none.
    """

    def __init__(
        self,
        name: str,
        kv: Client,
        daemon_id: str,
        lease: DaemonLease,
        rules: Rules,
        timing: Timing,
        *,
        started_s: float,
    ) -> None:
        self.name = name
        self.decision = Decision()
        self.record: QuorumRecord | None = None
        self.roster = Roster(timing.heartbeat_timeout_s)
        self._keys = JobKeys(name)
        self._kv = kv
        self._daemon_id = daemon_id
        self._lease = lease
        self.rules = rules
        self._timing = timing
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._control = ClientControl(kv)
        self._head = Reflector(self._control, below(self._keys.head), self._on_head, on_restored=self._on_restored)
        self._others: Reflector | None = None
        self._announced: dict[str, str] = {}  # by replica, the number of the ask in its key
        self._lease_number = 0
        self._turn_revision = 0  # mod revision of the key that orders this daemon's writes
        self._arbiter: KeyValue | None = None
        self._doubt_at_s = math.inf  # when the holder of the arbiter key must be a daemon
        self._record_revision = 0
        self._last_id = 0
        self._asks = 0
        self._seen: dict[str, float] = {}
        self._awaited: frozenset[str] = frozenset()
        self._has_read = False
        self._postponed_until_s = started_s + timing.heartbeat_timeout_s
        self._reason = ""
        self._refusal = ""
        lease.on_change(self._wake.set)

    # ---- what replicas say

    def heard(self, replica_id: str, connection: Hashable, identity: Identity) -> bool:
        """Record a heartbeat; return whether the replica has room.

        Arguments:
            replica_id, connection, identity: as in ``Roster.heard``.
        """
        if not self.roster.has_room(replica_id, identity):
            return False
        if self.roster.heard(replica_id, connection, self._loop.time(), identity):
            _log.info("%s: replica %s connected", self.name, replica_id)
            self._wake.set()
        return True

    def ask(
        self, message: bytes, connection: Hashable, waiter: Hashable, answer: Answer, identity: Identity
    ) -> Callable[[], None] | None:
        """Record a replica's ask for its next quorum; return a function that withdraws it, None: it has no room.

        Arguments:
            message: its ``QuorumMember``.
            answer: called with a ``LighthouseQuorumResponse``.
            identity: identity of its address.

        Raises:
            RecordError: the message cannot be decoded.
        """
        self._asks += 1
        ask = make_ask(message, f"{self._daemon_id}/{self._asks}")
        now_s = self._loop.time()
        if not self.heard(ask.replica_id, connection, identity):
            return None
        self.roster.asked(ask, waiter, answer, now_s)
        self._wake.set()
        return lambda: self._withdraw(ask.replica_id, waiter)

    def _withdraw(self, replica_id: str, waiter: Hashable) -> None:
        if self.roster.withdraw(replica_id, waiter):
            self._wake.set()

    def disconnected(self, connection: Hashable) -> None:
        """Record a closed connection; a replica without another one within the grace time is lost."""
        for replica_id in self.roster.disconnected(connection):
            self._loop.call_later(self._timing.disconnect_grace_s, self._drop_absent, replica_id)

    def _drop_absent(self, replica_id: str) -> None:
        if self.roster.drop_absent(replica_id):
            _log.info("%s: replica %s is lost: its connection closed", self.name, replica_id)
            self._wake.set()

    # ---- what the store says

    @property
    def is_arbiter(self) -> bool:
        """Whether this daemon is the arbiter, as far as it knows."""
        lease = self._lease.lease
        return self._arbiter is not None and lease is not None and self._arbiter.lease == lease.id

    def _on_head(self, _: Sequence[Event]) -> None:
        self._learn_arbiter(self._head.get(self._keys.arbiter))
        self._learn_quorum(self._head.get(self._keys.quorum))
        self._wake.set()
        if not self._has_read:
            self._has_read = True
            # They may be reconnecting to a service that has just started, so decide no quorum without them at once.
            self._awaited = frozenset(self.record.members if self.record is not None else ())

    def _on_restored(self) -> None:
        """Drop the known state: the store was replaced, and a new listing follows."""
        self._arbiter, self.record, self._record_revision = None, None, 0
        if self._last_id:
            self._leap()

    def _leap(self) -> None:
        """Skip the ids that were used after the backup, which perhaps no running daemon knows.

        The distance is random, because the same backup may be restored twice, with daemons that do not know each other.
        """
        self._last_id += ID_LEAP + secrets.randbelow(ID_LEAP)

    def _learn_arbiter(self, found: KeyValue | None) -> None:
        """Know who decides; one without a lease is a stranger's, and would stay for ever."""
        before = 0 if self._arbiter is None else self._arbiter.mod_revision
        self._arbiter = found if found is not None and found.lease else None
        if self._arbiter is not None and self._arbiter.mod_revision != before:
            own = crc32(self._daemon_id.encode(errors="replace")) / 2**32  # other daemons look at other times
            self._doubt_at_s = self._loop.time() + self._lease.ttl_s * (1.0 + own)

    def _learn_quorum(self, found: KeyValue | None) -> None:
        if found is None:
            if 0 < self._record_revision <= self._head.revision:
                _log.warning("%s: computing a new quorum: key %s was deleted", self.name, self._keys.quorum)
                self._record_revision = 0
                self._leap()
            return
        if found.mod_revision <= self._record_revision:
            return
        self._record_revision = found.mod_revision
        try:
            record = read(QuorumRecord, found)
            self._deliver(record)
        except RecordError as error:  # its id cannot be known
            _log.warning("%s: computing a new quorum: %s", self.name, error)
            self._leap()
        else:
            self.record = record
            self._last_id = max(self._last_id, record.quorum_id)

    def _deliver(self, record: QuorumRecord) -> None:
        body = record.answer()
        for replica_id, number in record.asks.items():
            self.roster.answer(replica_id, number, body)

    # ---- the loop

    async def run(self) -> None:
        """Serve the job until cancelled."""
        self._head.start()
        try:
            await self._work()
        finally:
            self._head.close()
            self._watch_others(False)

    async def _work(self) -> None:
        backoff = Backoff(max_s=RETRY_MAX_S)
        while True:
            await self._sleep()
            try:
                await self._turn()
                backoff.reset()
            except RaftKVError as error:
                self._note(error)
                await backoff.wait()
                self._wake.set()

    def _note(self, error: RaftKVError) -> None:
        """Log a permanent error, such as a missing permission, once, because replicas only wait."""
        passes = isinstance(error, StatusError) and (is_transient(error) or is_client_closed(error))
        _log.log(
            logging.DEBUG if passes or str(error) == self._refusal else logging.WARNING, "%s: %s", self.name, error
        )
        self._refusal = self._refusal if passes else str(error)

    async def _sleep(self) -> None:
        """Wait until something has happened, or time alone may change the decision."""
        now_s = self._loop.time()
        times = [self.roster.next_silence_s(now_s)]
        if self._awaited and self._postponed_until_s > now_s:
            times.append(self._postponed_until_s)
        if self._arbiter is not None and not self.is_arbiter:
            times.append(self._doubt_at_s)
        if self.decision.ask_again_s is not None:
            times.append(now_s + self.decision.ask_again_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(min((at for at in times if at is not None), default=None)):
                await self._wake.wait()
        self._wake.clear()

    async def _turn(self) -> None:
        if self._head.revision == 0 or self._lease.lease is None:
            return  # both wake this loop when they arrive
        if self._lease_number != self._lease.number:
            self._lease_number = self._lease.number
            self._announced.clear()
        if self._arbiter is None or (not self.is_arbiter and self._loop.time() >= self._doubt_at_s):
            await self._stand()
        self._watch_others(self.is_arbiter)
        await self._announce()
        if not self.is_arbiter:
            self.decision = Decision(reason="another daemon decides")
        elif self._others is not None and self._others.revision:
            await self._decide(self._others)

    async def _stand(self) -> None:
        """Become the arbiter, or learn that a daemon is."""
        keys, lease, holder = self._keys, self._lease.lease, self._arbiter
        turn, own = keys.turn(self._daemon_id), keys.arbiter
        result = await (
            self._kv.txn()
            .when(*self._vacancy(holder))
            .then(put(turn, lease=lease), put(own, self._daemon_id, lease=lease), get(own), get(keys.quorum))
            .otherwise(get(own), get(keys.quorum))
            .commit(timeout_s=CALL_TIMEOUT_S)
        )
        if result.succeeded:
            self._turn_revision = result.revision
            _log.info("%s: this daemon is now the leader", self.name)
        elif holder is not None:
            self._doubt_at_s = math.inf  # it is a daemon, unless the key is another one meanwhile
        self._load(result)

    def _vacancy(self, holder: KeyValue | None) -> list[Compare]:
        """Return the conditions under which the arbiter key is to be had; its holder's turn is under its lease too."""
        keys = self._keys
        if holder is None:
            return [lease_of(keys.arbiter) == 0]
        turn = keys.turn("").encode() + holder.value[:NAME_BYTES_MAX]
        return [mod_revision(keys.arbiter) == holder.mod_revision, lease_of(turn) != holder.lease]

    def _load(self, result: TxnResult) -> None:
        """Take what a txn has read of the head last, unless the watch knows later changes."""
        self._head.load((item for item in result.results[-2:] if item is not None), result.revision)
        self._wake.set()

    def _watch_others(self, wanted: bool) -> None:
        if wanted and self._others is None:
            self._others = Reflector(self._control, below(self._keys.members), lambda _: self._wake.set())
            self._others.start()
        elif not wanted and self._others is not None:
            self._others.close()
            self._others = None

    # ---- telling the others who is here

    async def _announce(self) -> None:
        """Update the keys of this daemon's replicas, in one txn if they fit.

        A delayed txn must not restore the key of a lost replica, so it fails if another turn has been written since.
        """
        changes = self._changes()[:OPERATIONS_MAX]
        if not changes:
            return
        operations: list[Operation] = []
        for name, ask in changes:
            key = self._keys.member(self._daemon_id, name)
            value = None if ask is _ABSENT else MemberRecord.of(ask).encode()
            operations.append(delete(key) if value is None else put(key, value, lease=self._lease.lease))
        turn = self._keys.turn(self._daemon_id)
        result = await (
            self._kv.txn()
            .when(mod_revision(turn) == self._turn_revision)
            .then(put(turn, lease=self._lease.lease), *operations)
            .otherwise(get(turn))
            .commit(timeout_s=CALL_TIMEOUT_S)
        )
        self._wake.set()
        if not result.succeeded:  # an attempt whose answer was lost has succeeded; repeating it does no harm
            found = result.results[0]
            self._turn_revision = 0 if found is None else found.mod_revision
            return
        self._turn_revision = result.revision
        for name, ask in changes:
            if ask is _ABSENT:
                self._announced.pop(name, None)
            else:
                self._announced[name] = ask.number if ask is not None else ""

    def _changes(self) -> list[tuple[str, Ask | None]]:
        """Return replicas whose keys are outdated, with their asks; ``_ABSENT``: the replica is lost."""
        there = self.roster.healthy(self._loop.time())
        changes: list[tuple[str, Ask | None]] = [(name, _ABSENT) for name in sorted(self._announced.keys() - there)]
        for name in sorted(there):
            announced = self._announced.get(name)
            ask = self.roster.replicas[name].ask
            if announced is None:
                changes.append((name, None if self.is_arbiter else ask))
            elif self.is_arbiter or announced == (ask.number if ask is not None else ""):
                continue
            elif ask is not None or not self._is_answered(name, announced):
                changes.append((name, ask))
        return changes

    # ---- deciding

    async def _decide(self, others: Reflector) -> None:
        view = self._view(others)
        self.decision = decide(view, self.rules, self._loop.time())
        self._tell()
        members = self.decision.members
        if not members:
            return
        own = all(ask.number.startswith(f"{self._daemon_id}/") for ask in members)
        stored, cluster = self.record, self._lease.cluster
        if stored is not None and stored.cluster not in ("", cluster) and stored.quorum_id == self._last_id:
            self._leap()
        is_new = self.decision.new_id or (0 if stored is None else stored.quorum_id) < self._last_id
        number = self._last_id + is_new
        if number > QUORUM_ID_MAX:  # only a stranger's quorum comes near it
            number = 1 + secrets.randbelow(ID_LEAP)
        record = QuorumRecord.of(number, members, time.time(), cluster)
        if await self._commit(None if own and not is_new else record):
            if is_new:
                _log.info("%s: quorum %d: %s", self.name, record.quorum_id, ", ".join(record.members))
            self._deliver(record)
        self._wake.set()

    def _view(self, others: Reflector) -> View:
        """Return the known state at this moment."""
        now_s = self._loop.time()
        healthy = set(self.roster.healthy(now_s))
        asks = self.roster.asks()
        for name, ask in self._others_there(others):
            healthy.add(name)
            if ask is not None and name not in asks and not self._is_answered(name, ask.number):
                asks[name] = ask, self._seen.setdefault(ask.number, now_s)
        self._seen = {ask.number: since for ask, since in asks.values()}
        self._awaited -= healthy
        if now_s >= self._postponed_until_s:
            self._awaited = frozenset()
        return View(frozenset(healthy | self._awaited), asks, self.record.members if self.record else None)

    def _others_there(self, others: Reflector) -> Iterator[tuple[str, Ask | None]]:
        """Return replicas of other daemons; if a replica has changed its daemon, the newer key comes last."""
        for item in sorted(others.items.values(), key=lambda item: item.mod_revision):
            key = item.key.decode(errors="replace")
            daemon_id, replica_id = self._keys.parse_member(key)
            if daemon_id == self._daemon_id or not item.lease:  # without one it is no daemon's, and would stay for ever
                continue
            try:
                ask = MemberRecord.decode(item.value).to_ask()
                if ask is not None and (ask.replica_id, ask.number.partition("/")[0]) != (replica_id, daemon_id):
                    raise RecordError(MemberRecord.NAME, "it is the record of another key")
            except RecordError as error:
                _log.debug("%s: %s: %s", self.name, key, error)
            else:
                yield replica_id, ask

    def _is_answered(self, replica_id: str, number: str) -> bool:
        return self.record is not None and self.record.has_answered(replica_id, number)

    def _tell(self) -> None:
        if self.decision.reason != self._reason:
            self._reason = self.decision.reason
            _log.debug("%s: %s", self.name, self._reason)

    async def _commit(self, record: QuorumRecord | None) -> bool:
        """Write a quorum, or none; return whether this daemon is still the arbiter and knows the last quorum."""
        if self._arbiter is None:
            return False
        keys = self._keys
        operation = get(keys.arbiter) if record is None else put(keys.quorum, record.encode())
        result = await (
            self._kv.txn()
            .when(
                mod_revision(keys.arbiter) == self._arbiter.mod_revision,
                mod_revision(keys.quorum) == self._record_revision,
            )
            .then(operation)
            .otherwise(get(keys.arbiter), get(keys.quorum))
            .commit(timeout_s=CALL_TIMEOUT_S)
        )
        if not result.succeeded:
            self._load(result)
        elif record is not None and result.revision > self._record_revision:
            self.record, self._record_revision = record, result.revision
            self._last_id = record.quorum_id
        return result.succeeded
