"""Lease owners: they grant a lease, keep it alive at changing members, and finally revoke or abandon it.

Owns the promises to owners: each acknowledged grant and keep-alive counts, by the owner's clock, from the moment it was
*sent*. The checkers enforce these promises (L2, L5); ``check_ended`` is L3.
"""

from __future__ import annotations

import random
from functools import partial

from raftkv.pb import rpc_pb2
from raftkv.pb.services import SERVICES
from tests.sim.clients.history import Operation, Outcome, ViolationError
from tests.sim.clients.workload import GRANT, REVOKE, Workload
from tests.sim.cluster import Cluster
from tests.sim.devices.calls import Stream

KEEP_ALIVE = SERVICES["etcdserverpb.Lease"]["LeaseKeepAlive"].path
RETRY_S = 0.2
GRACE_MS = 200
LATE_S = 6.0
"""How much later than their TTL leases may end when all is well again: see the head of ``raftkv.replica.lease``."""
_CLIENT = 2_000_000


class Owner:
    """An owner with one lease at a time.

    Arguments:
        number: of this owner.
        workload: through whose history grants and revocations go.
    """

    def __init__(self, number: int, workload: Workload, cluster: Cluster, rng: random.Random) -> None:
        self._number = number
        self._workload = workload
        self._cluster = cluster
        self._rng = rng
        self._granted = 0
        self._lease_id = 0
        self._ttl_s = 0
        self._rounds_left = 0
        self._stream: Stream | None = None
        self._streams = 0
        self._asked_at: float | None = None
        self._kept_by = 0
        """The stream that brought the last answer."""
        self._graced: set[int] = set()
        """Leases that its break is to end soon."""
        self._running = True

    def start(self) -> None:
        """Begin."""
        self._cluster.scheduler.after(self._rng.random(), self._grant)

    def stop(self) -> None:
        """Forget the lease."""
        self._running = False
        self._forget()

    def _again(self) -> None:
        self._cluster.scheduler.after(RETRY_S * (1 + self._rng.random()), self._grant)

    def _grant(self) -> None:
        member_id = self._workload.pick_member()
        if not self._running:
            return
        if member_id is None:
            self._again()
            return
        self._granted += 1
        lease_id = 1000 * self._number + self._granted
        ttl_s = self._rng.randint(1, self._workload.parameters.ttl_s_max)
        sent_at = self._cluster.scheduler.now
        operation = Operation(GRANT, rpc_pb2.LeaseGrantRequest(ID=lease_id, TTL=ttl_s))

        def answered(outcome: Outcome | None) -> None:
            if outcome is None or outcome.error or not self._running or self._lease_id:
                return
            self._cluster.checkers.kept_alive(lease_id, sent_at, ttl_s)
            self._hold(lease_id, ttl_s)

        self._workload.call(_CLIENT + self._number, member_id, operation, answered)
        self._cluster.scheduler.after(self._workload.parameters.timeout_s, self._check_held)

    def _check_held(self) -> None:
        if not self._lease_id and self._running:
            self._again()

    def _hold(self, lease_id: int, ttl_s: int) -> None:
        self._lease_id, self._ttl_s = lease_id, ttl_s
        self._workload.lease_ids.append(lease_id)
        self._rounds_left = self._rng.randrange(10)
        self._keep(lease_id)

    def _forget(self) -> None:
        if self._lease_id in self._workload.lease_ids:
            self._workload.lease_ids.remove(self._lease_id)
        self._lease_id = 0

    def _keep(self, lease_id: int) -> None:
        """Send a keep-alive each third of the TTL; leave a stream that is silent for as long."""
        if lease_id != self._lease_id or not self._running:
            return
        self._rounds_left -= 1
        if self._rounds_left < 0:
            self._end(lease_id)
            return
        if self._asked_at is not None or self._stream is None or self._stream.is_over:
            self._open()
        if self._stream is not None:
            self._asked_at = self._cluster.scheduler.now
            request = rpc_pb2.LeaseKeepAliveRequest(ID=lease_id)
            if self._rng.random() < 0.3:
                request.disconnect_grace_ms = GRACE_MS
                self._graced.add(lease_id)
            self._cluster.members[self._member_id].call_soon(self._stream.send, request.SerializeToString())
        self._cluster.scheduler.after(self._ttl_s / 3, self._keep, lease_id)

    def _open(self) -> None:
        """Continue at another member. The old stream is closed cleanly, so no grace begins."""
        old, self._stream = self._stream, None
        if old is not None and not old.is_over:
            member = self._cluster.members[self._member_id]
            member.streams.discard(old)
            member.call_soon(partial(old.close, severed=False))
        member_id = self._workload.pick_member()
        self._asked_at = None
        if member_id is None:
            return
        self._streams += 1
        self._member_id = member_id
        number, self._graced = self._streams, set()
        self._stream = Stream(
            1000 * self._number + number,
            lambda message: self._kept(number, message),
            lambda error: self._broke(number, error),
        )
        self._cluster.members[member_id].open(KEEP_ALIVE, self._stream)

    def _kept(self, number: int, message: bytes) -> None:
        response = rpc_pb2.LeaseKeepAliveResponse.FromString(message)
        self._cluster.journal.record("kept", response.ID, response.TTL)
        asked_at = self._asked_at
        if number != self._streams or asked_at is None or self._lease_id != response.ID:
            return
        self._asked_at = None
        self._kept_by = number
        self._cluster.checkers.kept_alive(response.ID, asked_at, response.TTL)
        if response.TTL <= 0:
            self._cluster.checkers.found_gone(response.ID)
            self._forget()
            self._again()

    def _broke(self, number: int, error: BaseException | None) -> None:
        """Handle a broken connection: leases with a disconnect grace may now end after it."""
        if isinstance(error, ConnectionResetError) and number >= self._kept_by:
            for lease_id in sorted(self._graced):
                self._cluster.checkers.let_go(lease_id, GRACE_MS / 1000)

    def _end(self, lease_id: int) -> None:
        """Revoke the lease or let it expire."""
        self._forget()
        member_id = self._workload.pick_member()
        if member_id is not None and self._rng.random() < 0.4:
            operation = Operation(REVOKE, rpc_pb2.LeaseRevokeRequest(ID=lease_id))
            self._workload.call(_CLIENT + self._number, member_id, operation, lambda outcome: None)
        self._again()


def check_ended(cluster: Cluster, ttl_s_max: int, election_s: float) -> None:
    """Check that without keep-alives and faults all leases end in time (L3)."""
    deadline = cluster.scheduler.now + ttl_s_max + 2 * election_s + LATE_S
    leases = cluster.checkers.replay.leases
    if leases and not cluster.run_until(deadline, lambda: not leases):
        raise ViolationError("L3", f"leases {leases} did not end within {ttl_s_max + 2 * election_s + LATE_S} s")
