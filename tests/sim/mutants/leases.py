"""Planted bugs in lease expiry."""

from __future__ import annotations

from typing import Any

from raftkv.replica.lease.graces import ConnectionLost
from raftkv.replica.lease.lessor import Lessor
from raftkv.replica.lease.on_leader import OnLeader
from raftkv.replica.lease.renewals import Renewals
from raftkv.replica.lease.times import FRESH, UNLOGGED, LeaseTimes
from raftkv.server.streams import keep_alives
from tests.sim.corners import lease_corner
from tests.sim.mutants.registry import Patches, mutant


@mutant("lease lasts half its TTL", "no lease ends early (L2)", lease_corner)
def _half_a_ttl(patches: Patches) -> None:
    def end_of(times: LeaseTimes, lease: Any) -> float:
        return float(original(times, lease)) - lease.ttl_s / 2

    original = patches.set(LeaseTimes, "_end_of", end_of)


@mutant("renewals seen by the leader alone", "every member notes what the log renews (L2)", lease_corner)
def _renewals_unseen(patches: Patches) -> None:
    def renewed(times: LeaseTimes, lease_ids: Any) -> None:
        if times.is_primary:
            original(times, lease_ids)

    original = patches.set(LeaseTimes, "renewed", renewed)


@mutant("keep-alives never logged", "a renewal is in the log before it is answered (L2)", lease_corner)
def _never_logged(patches: Patches) -> None:
    def renew(times: LeaseTimes, lease_id: int) -> int:
        verdict = int(original(times, lease_id))
        return FRESH if verdict == UNLOGGED else verdict

    original = patches.set(LeaseTimes, "renew", renew)


@mutant("ending lease renewed", "nothing saves a lease whose end is on its way (L2)", lease_corner)
def _renewed_while_ending(patches: Patches) -> None:
    def renew(times: LeaseTimes, lease_id: int) -> int:
        lease = times._leases.get(lease_id)
        if lease is not None and lease.is_expiring:
            return FRESH
        return int(original(times, lease_id))

    original = patches.set(LeaseTimes, "renew", renew)


@mutant("restart does not count as a renewal", "a member that starts knows of no renewal (L2)", lease_corner)
def _restart_no_renewal(patches: Patches) -> None:
    def reloaded(times: LeaseTimes, granted: dict[int, int]) -> None:
        original(times, granted)
        for lease in times._leases.values():
            lease.renewed_at = -1e9

    original = patches.set(LeaseTimes, "reloaded", reloaded)
    patches.set(LeaseTimes, "_end_of", lambda times, lease: lease.ends_at)


@mutant("leases never end", "a lease ends when its time is over (L3)", lease_corner)
def _never_end(patches: Patches) -> None:
    patches.set(LeaseTimes, "has_due", lambda times: False)


@mutant("keep-alives lost with their leader", "what waits goes to the next leader (L2)", lease_corner)
def _answered_when_deposed(patches: Patches) -> None:
    def surrender(renewals: Renewals) -> list[Any]:
        for pending in (taken := original(renewals)):
            pending.answer(60)
        return [] if taken else taken

    original = patches.set(Renewals, "surrender", surrender)


@mutant("late keep-alive taken for a new break", "any keep-alive since undoes a break (L2)", lease_corner)
def _late_break(patches: Patches) -> None:
    def kept(stream: Any, lease_id: int, grace_ms: int, ttl_s: int) -> None:
        graces = stream._service.graces
        if stream._ended and stream._call.severed and grace_ms > 0 and ttl_s > 0 and lease_id not in graces._keepers:
            graces._report([ConnectionLost(lease_id, grace_ms / 1000, graces._clock())])
        original(stream, lease_id, grace_ms, ttl_s)

    original = patches.set(keep_alives.KeepAliveStream, "kept", kept)


@mutant("followers answer keep-alives", "the leader alone decides about leases (L2)", lease_corner)
def _followers_answer(patches: Patches) -> None:
    def keep_alive(lessor: Lessor, pending: Any) -> None:
        pending.answer(lessor.times.ttl_s(pending.lease_id))

    patches.set(Lessor, "keep_alive", keep_alive)


@mutant("leadership trusted for ever", "a leader that answers at once was confirmed a moment ago (L2)", lease_corner)
def _trusted_for_ever(patches: Patches) -> None:
    patches.set(OnLeader, "is_recent", lambda on_leader, now: on_leader._is_primary())
