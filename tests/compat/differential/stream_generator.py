"""A seeded program of writes, watches, leases, locks and elections, valid and not, for two clusters in step.

Owns what is done, never what is right. Revisions are given as places in the history (`At`), ids of leases and names of
locks come from small pools, so that operations meet, and so that a program with operations left out means the same.

    for op in Generator(seed=7).program(200):
        ...

Like the other generator it draws a new mixture every few dozen operations (swarm testing).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from raftkv.pb import election_pb2, lock_pb2, rpc_pb2

LEASES = (10, 11, 12, 13, 14, 15)
NAMES = (b"n", b"m", b"n/x")
PLAIN_KEYS = (b"a", b"b", b"c", b"d/1", b"d/2", b"\xff")
QUEUE_KEYS = (b"n/a", b"n/b", b"n/c", b"m/a", b"m/d", b"n/x/a", b"n/zz")
KEYS = PLAIN_KEYS * 2 + QUEUE_KEYS
ENDS = (b"", b"", b"", b"\0", b"b\0", b"d/9", b"n0", b"zz", b"a")
SESSIONS = 3
LONG_TTLS = (300, 1000, 9_000_000_000)
REFUSED_TTLS = (9_000_000_001, 2**63 - 1)
SHORT_TTLS = (0, 1, -1, 2, -(2**63))
BIG_BYTES = 400_000


@dataclass(frozen=True)
class At:
    """A revision by its place: `amount` from the current or the compacted one, or that part of the way between."""

    anchor: str
    amount: float

    def resolve(self, compacted: int, current: int) -> int:
        """The revision."""
        if self.anchor == "history":
            return compacted + int(self.amount * (current - compacted))
        return int({"now": current, "compacted": compacted, "zero": 0}[self.anchor] + self.amount)


@dataclass(frozen=True)
class Op:
    """One operation.

    Attributes:
        kind: what to do; `KINDS` of the generator.
        request: the message to send, where there is one.
        number: which watch stream, or which of the waiting calls.
        at: the revision to put into the request.
    """

    kind: str
    request: Any = None
    number: int = 0
    at: At | None = None


class Generator:
    """See the module's text. The same seed gives the same program."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._kinds = (
            *(self.put, self.delete, self.txn, self.compact, self.big_txn),
            *(self.watch, self.cancel, self.progress, self.close, self.create_many),
            *(self.grant, self.revoke, self.time_to_live, self.leases, self.keep_alive),
            *(
                self.lock, self.unlock, self.campaign, self.proclaim, self.resign, self.leader, self.observe,
                self.give_up,
            ),
        )  # fmt: skip

    def program(self, length: int) -> Iterator[Op]:
        """Some leases first, then anything."""
        for lease in LEASES[:4]:
            yield Op("lease", rpc_pb2.LeaseGrantRequest(ID=lease, TTL=1000))
        for step in range(length):
            if step % 40 == 0:
                weights = [self.random.choice((0, 1, 2, 4)) for _ in self._kinds]
                weights[0] += 3
                weights[5] += 1
                weights[4] = min(weights[4], 1) * 0.2
                weights[3] *= 0.3
                for rare in (8, 9, 11):
                    weights[rare] *= 0.4
            (kind,) = self.random.choices(self._kinds, weights)
            yield kind()

    def _often(self, percent: float) -> bool:
        return self.random.random() * 100 < percent

    # --- keys ---------------------------------------------------------------------------------------------------

    def _lease(self) -> int:
        return self.random.choice(LEASES)

    def put(self) -> Op:
        """A put, often with a lease, which may not exist."""
        request = rpc_pb2.PutRequest(key=self.random.choice(KEYS), value=b"%d" % self.random.randrange(5))
        if self._often(40):
            request.lease = self._lease()
        elif self._often(15):
            request.ignore_lease = True
        return Op("kv", request)

    def delete(self) -> Op:
        """A deletion of a key or an interval."""
        end = self.random.choice(ENDS) if self._often(30) else b""
        return Op("kv", rpc_pb2.DeleteRangeRequest(key=self.random.choice(KEYS), range_end=end))

    def txn(self) -> Op:
        """Several writes at one revision: of different keys, or it would be refused, and of one queue at most one."""
        keys = [*self.random.sample(PLAIN_KEYS, self.random.randint(1, 4)), self.random.choice(QUEUE_KEYS)]
        self.random.shuffle(keys)
        operations = []
        for key in keys:
            if self._often(70):
                put = rpc_pb2.PutRequest(key=key, value=b"t", lease=self._lease() if self._often(20) else 0)
                operations.append(rpc_pb2.RequestOp(request_put=put))
            else:
                operations.append(rpc_pb2.RequestOp(request_delete_range=rpc_pb2.DeleteRangeRequest(key=key)))
        return Op("kv", rpc_pb2.TxnRequest(success=operations))

    def big_txn(self) -> Op:
        """A revision whose events, with what was there before, do not fit into one message."""
        keys = (b"big/1", b"big/2", b"big/3")
        puts = [rpc_pb2.PutRequest(key=key, value=b"x" * BIG_BYTES) for key in keys]
        return Op("kv", rpc_pb2.TxnRequest(success=[rpc_pb2.RequestOp(request_put=put) for put in puts]))

    def compact(self) -> Op:
        """A compaction, sometimes of nothing or of the future."""
        at = At("history", self.random.random()) if self._often(80) else self._at()
        return Op("kv", rpc_pb2.CompactionRequest(), at=at)

    def _at(self) -> At:
        choice = self.random.randrange(10)
        if choice < 4:
            return At("history", self.random.random())
        if choice < 7:
            return At("now", self.random.choice((-1, 0, 1, 3)))
        if choice < 9:
            return At("compacted", self.random.choice((-1, 0, 1)))
        return At("zero", self.random.choice((1, -1)))

    # --- watches ------------------------------------------------------------------------------------------------

    def watch(self) -> Op:
        """A watcher with any options."""
        create = rpc_pb2.WatchCreateRequest(
            key=self.random.choice((*KEYS, b"", b"a", b"\0", b"n", b"big")), range_end=self.random.choice(ENDS)
        )
        if self._often(20):
            create.key, create.range_end = b"\0", b"\0"
        create.prev_kv = self._often(40)
        create.fragment = self._often(30)
        create.progress_notify = self._often(10)
        if self._often(25):
            create.filters.append(self.random.choice((0, 1)))
        if self._often(3):
            create.filters.extend((0, 1))
        if self._often(30):
            create.watch_id = self.random.choice((1, 2, 5, 7, 1 << 62, -7))
        return Op("watch", create, self.random.randrange(SESSIONS), self._at() if self._often(40) else None)

    def create_many(self) -> Op:
        """Not a request: several watchers at once on a new stream."""
        return Op("many", rpc_pb2.WatchCreateRequest(key=b"a", range_end=b"e"), self.random.randrange(SESSIONS))

    def cancel(self) -> Op:
        """The end of a watcher, which may not exist."""
        request = rpc_pb2.WatchCancelRequest(watch_id=self.random.choice((0, 0, 0, 1, 1, 2, 5, 99)))
        return Op("cancel", request, self.random.randrange(SESSIONS))

    def progress(self) -> Op:
        """A request for progress."""
        return Op("progress", rpc_pb2.WatchProgressRequest(), self.random.randrange(SESSIONS))

    def close(self) -> Op:
        """The end of a watch stream."""
        return Op("close", None, self.random.randrange(SESSIONS))

    # --- leases -------------------------------------------------------------------------------------------------

    def grant(self) -> Op:
        """A grant: new, of an id in use, chosen by the server, refused; a short one is revoked at once."""
        lease = self.random.choice((*LEASES, *LEASES, 0, -3, 2**63 - 1))
        choice = self.random.randrange(10)
        if choice < 7:
            return Op("lease", rpc_pb2.LeaseGrantRequest(ID=lease, TTL=self.random.choice(LONG_TTLS)))
        if choice < 8:
            return Op("lease", rpc_pb2.LeaseGrantRequest(ID=lease, TTL=self.random.choice(REFUSED_TTLS)))
        return Op("short", rpc_pb2.LeaseGrantRequest(ID=77, TTL=self.random.choice(SHORT_TTLS)))

    def revoke(self) -> Op:
        """A revocation, perhaps of nothing."""
        return Op("lease", rpc_pb2.LeaseRevokeRequest(ID=self.random.choice((*LEASES, *LEASES, 0, 99, -3))))

    def time_to_live(self) -> Op:
        """A question for a lease and its keys."""
        request = rpc_pb2.LeaseTimeToLiveRequest(ID=self.random.choice((*LEASES, 0, 99)), keys=self._often(80))
        return Op("lease", request)

    def leases(self) -> Op:
        """A question for all leases."""
        return Op("lease", rpc_pb2.LeaseLeasesRequest())

    def keep_alive(self) -> Op:
        """A renewal."""
        return Op("keep", rpc_pb2.LeaseKeepAliveRequest(ID=self.random.choice((*LEASES, 0, 99))))

    # --- locks and elections --------------------------------------------------------------------------------------

    def lock(self) -> Op:
        """A lock that may have to wait."""
        return Op("lock", lock_pb2.LockRequest(name=self.random.choice(NAMES), lease=self._lease()))

    def unlock(self) -> Op:
        """The release of a lock that may not be held."""
        key = self.random.choice((*QUEUE_KEYS, *QUEUE_KEYS, b""))
        return Op("recipe", lock_pb2.UnlockRequest(key=key))

    def campaign(self) -> Op:
        """A campaign that may have to wait."""
        value = b"%d" % self.random.randrange(3)
        request = election_pb2.CampaignRequest(name=self.random.choice(NAMES), lease=self._lease(), value=value)
        return Op("campaign", request)

    def _leader_key(self) -> election_pb2.LeaderKey:
        name, lease = self.random.choice(NAMES), self._lease()
        return election_pb2.LeaderKey(name=name, key=name + b"/%x" % lease, lease=lease)

    def proclaim(self) -> Op:
        """A proclamation, mostly of a key that exists; `number` is added to its create revision."""
        request = election_pb2.ProclaimRequest(leader=self._leader_key(), value=b"p%d" % self.random.randrange(3))
        if self._often(5):
            request.ClearField("leader")
        return Op("leader", request, 1 if self._often(15) else 0)

    def resign(self) -> Op:
        """The same for a resignation."""
        request = election_pb2.ResignRequest(leader=self._leader_key())
        if self._often(5):
            request.ClearField("leader")
        return Op("leader", request, 1 if self._often(15) else 0)

    def leader(self) -> Op:
        """A question for the leader."""
        return Op("recipe", election_pb2.LeaderRequest(name=self.random.choice((*NAMES, b"nobody"))))

    def observe(self) -> Op:
        """An observer, if there is a leader."""
        return Op("observe", election_pb2.LeaderRequest(name=self.random.choice(NAMES)))

    def give_up(self) -> Op:
        """The end of one of the calls that wait, from the client's side."""
        return Op("give up", None, self.random.randrange(8))
