"""Errands: what members ask the leader about leases, each as ``lease.routing`` carries it.

    Renewal       keep-alives of one turn            LeaseRenew
    TimeToLive    the time that a lease has left     LeaseTimeToLive
    Shortening    owners whose connection broke      LeaseShorten

An errand knows how it is served here and how it looks on the wire; where it goes is the router's business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from raftkv import errors
from raftkv.pb import raft_pb2, rpc_pb2
from raftkv.pb.services import SERVICES
from raftkv.server.lease.graces import Orphan
from raftkv.server.lease.renewals import Done, Renewals, Ticket

if TYPE_CHECKING:
    from raftkv.server.lease.lessor import Lessor

_PEER: Final = SERVICES["raftkvpb.Peer"]
LEASE_RENEW_PATH: Final = _PEER["LeaseRenew"].path
LEASE_TIME_TO_LIVE_PATH: Final = _PEER["LeaseTimeToLive"].path
LEASE_SHORTEN_PATH: Final = _PEER["LeaseShorten"].path


def nothing() -> None:
    """For errands that nobody waits for."""


def ignore(error: errors.StatusError | None) -> None:
    """Likewise, of those that may fail."""


class Renewal:
    """Keep-alives of one turn.

    Arguments:
        renewals: answer them if this member leads.
        tickets: of one deadline, all from here or all from elsewhere.
        settled: called when all are answered or will not be.
    """

    path = LEASE_RENEW_PATH
    trusts_recent = True

    def __init__(self, renewals: Renewals, tickets: list[Ticket], settled: Callable[[], None] = nothing) -> None:
        self.deadline = tickets[0].deadline
        self.is_local = tickets[0].is_local
        self._renewals = renewals
        self._tickets = tickets
        self._settled = settled

    def serve(self) -> None:
        """See ``Errand``."""
        self._renewals.take(self._tickets)
        self._settled()

    def request(self) -> bytes:
        """See ``Errand``."""
        ids = [ticket.lease_id for ticket in self._tickets]
        return raft_pb2.LeaseRenewRequest(ids=ids).SerializeToString()

    def take(self, response: bytes) -> None:
        """See ``Errand``."""
        ttls = raft_pb2.LeaseRenewResponse.FromString(response).ttls
        if len(ttls) != len(self._tickets):
            raise ValueError(f"{len(ttls)} answers to {len(self._tickets)} keep-alives")
        for ticket, ttl_s in zip(self._tickets, ttls, strict=True):
            ticket.answer(ttl_s)
        self._settled()

    def fail(self, error: errors.StatusError) -> None:
        """See ``Errand``."""
        for ticket in self._tickets:
            ticket.fail(error)
        self._settled()


class TimeToLive:
    """A question for the time that a lease has left.

    Arguments:
        lessor: of this member.
        request: the client's.
        deadline: loop time.
        is_local: whether the client is this member's.
        done: gets the response without its header, and whether it is whole: this member leaves out the keys, which may
            be very many; another one has put them in.
        failed: gets the error instead.
    """

    path = LEASE_TIME_TO_LIVE_PATH
    trusts_recent = False

    def __init__(
        self,
        lessor: Lessor,
        request: rpc_pb2.LeaseTimeToLiveRequest,
        *,
        is_local: bool,
        done: Callable[[bytes, bool], None],
        failed: Callable[[errors.StatusError], None],
    ) -> None:
        self.deadline = lessor.new_deadline()
        self.is_local = is_local
        self.fail = failed
        self._lessor = lessor
        self._request = request
        self._done = done

    def serve(self) -> None:
        """See ``Errand``."""
        # The keys of a lease that is being ended in slices would be seen to go one by one.
        self._lessor.when_whole(self._serve)

    def _serve(self) -> None:
        self._done(self._lessor.time_to_live(self._request).SerializeToString(), not self._request.keys)

    def request(self) -> bytes:
        """See ``Errand``."""
        return self._request.SerializeToString()

    def take(self, response: bytes) -> None:
        """See ``Errand``."""
        self._done(response, True)


class Shortening:
    """Leases that shall end soon because the connection of their owner broke. Nobody waits for that.

    Arguments:
        lessor: of this member.
        orphans: the leases.
        is_local: whether the connection was to this member.
        settled: called with None when it is done, with the error when it will not be: the leases end with their TTL.
    """

    path = LEASE_SHORTEN_PATH
    trusts_recent = True

    def __init__(self, lessor: Lessor, orphans: list[Orphan], *, is_local: bool, settled: Done = ignore) -> None:
        self.deadline = lessor.new_deadline()
        self.is_local = is_local
        self._lessor = lessor
        self._orphans = orphans
        self._settled = settled

    def serve(self) -> None:
        """See ``Errand``."""
        self._lessor.shorten(self._orphans)
        self._settled(None)

    def request(self) -> bytes:
        """See ``Errand``."""
        now = self._lessor.clock()
        request = raft_pb2.LeaseShortenRequest()
        for orphan in self._orphans:
            request.ids.append(orphan.lease_id)
            request.graces_ms.append(round(orphan.grace_s * 1000))
            request.ages_us.append(int((now - orphan.answered_at) * 1_000_000))
        return request.SerializeToString()

    def take(self, response: bytes) -> None:
        """See ``Errand``."""
        self._settled(None)

    def fail(self, error: errors.StatusError) -> None:
        """See ``Errand``."""
        self._settled(error)
