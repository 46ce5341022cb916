"""What the simulator's members do about leases, as traces that TLC compares with ``docs/spec/Lease.tla``.

A window is one lease, from its grant on: the entries that each member applies, elections, restarts, and what the leader
decides. Times are microseconds. A lease that a broken connection shortens is not followed further.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

from raftkv.apply.applier import Applier
from raftkv.apply.wire import Kind
from raftkv.raft.core import Raft
from raftkv.replica.lease.lessor import Lessor
from raftkv.replica.lease.renewals import Renewals
from raftkv.replica.lease.times import FRESH, UNLOGGED, LeaseTimes
from tests.sim.cluster import Cluster
from tests.sim.corners import lease_corner
from tests.sim.member import Member
from tests.sim.mutants.registry import Patches
from tests.sim.swarm import Report, run_seed
from tests.spec.recorder import LINES_MAX, literal, windows_module

MEMBERS_MAX = 9
WINDOWS_MAX = 4
"""Leases of one simulation."""
TTL_S = 1
"""TTL of recorded leases in seconds: a constant of the specification."""
US = 1_000_000
ROUNDING_US = 2
"""Added to the time of a renewal, so that rounding puts no answer behind the time for which it counts."""
DECISIONS = {int(Kind.LEASE_RENEW): "renew", int(Kind.LEASE_EXPIRE): "expire"}


def run(seed: int) -> Report:
    """Simulate leases without the simulator's own check of them, so that a bug shows in what follows."""
    base = lease_corner(seed)
    cluster = replace(base.cluster, checks_disabled=frozenset({"L2"}))
    return run_seed(seed, replace(base, cluster=cluster, workload=replace(base.workload, ttl_s_max=TTL_S)))


class Traces:
    """Windows of some simulations."""

    def __init__(self) -> None:
        self.windows: list[dict[str, Any]] = []

    def module(self) -> str:
        """Return them as a module of TLA+."""
        members = set(range(1, MEMBERS_MAX + 1))
        return windows_module([f"MembersThere == {literal(members)}", f"Traces == {literal(self.windows)}"])


class _Lease:
    """One lease: its window, and the entries about it."""

    def __init__(self, window: dict[str, Any]) -> None:
        self.window = window
        self.indexes: list[int] = []
        self.proposed_at: dict[int, int] = {}

    def known_at(self, index: int) -> int:
        """Return how many of its entries there are up to an index of the log."""
        return bisect_right(self.indexes, index)


class Trace:
    """The leases of one simulation."""

    def __init__(self, traces: Traces) -> None:
        self._windows = traces.windows
        self.begin()

    def begin(self, cluster: Cluster | None = None) -> None:
        """Forget the simulation before."""
        self.cluster = cluster
        self._number: dict[int, int] = {}
        self._leases: dict[int, _Lease] = {}
        self._lessors: dict[int, Lessor] = {}
        self._received: dict[int, int] = {}
        self._applying: dict[int, tuple[int, int]] = {}
        self._term = self._leader = 0
        self._leads = False
        self.is_confirmed = False

    def member(self, member_id: int) -> int:
        """A small number in the place of an id."""
        return self._number.setdefault(member_id, len(self._number) + 1)

    def _of(self, part: Any) -> Lessor | None:
        """Return the lessor that a part of a live member belongs to."""
        return next((each for each in self._lessors.values() if part in (each, each.times, each._rights)), None)

    def _now(self) -> int:
        assert self.cluster is not None
        return round(self.cluster.scheduler.now * US)

    def _line(self, lease: _Lease, at: int, **told: Any) -> None:
        window = lease.window
        if not window["over"] and len(window["lines"]) < LINES_MAX:
            window["lines"].append({**told, "now": at - window["from"] + US})

    def _everywhere(self, at: int, **told: Any) -> None:
        for lease in self._leases.values():
            self._line(lease, at, **told)

    # -- members

    def starts(self, lessor: Lessor) -> None:
        """Note that a member has started, or has received a database."""
        member = lessor._node.settings.member_id
        is_new = self._lessors.get(member) is not lessor
        self._lessors[member] = lessor
        at = self._now()
        for lease in self._leases.values():
            since = self._received.pop(member, at) - lease.window["from"] + US
            known = lease.known_at(lessor._store.applied_index)
            self._line(lease, at, op="starts", i=self.member(member), k=known, since=since, isNew=is_new)
        if is_new and self._leader == self.member(member):
            self._leader, self._leads = 0, False

    def dies(self, member_id: int) -> None:
        """Look no more at a process: what it still does while it dies is no step."""
        self._lessors.pop(member_id, None)

    def elected(self, raft: Raft) -> None:
        """Note a new leader."""
        lessor = self._lessors.get(raft.id)
        if lessor is not None and raft.term > self._term:
            self._term, self._leader, self._leads = raft.term, self.member(raft.id), False
            self._everywhere(self._now(), op="elect", i=self._leader, term=raft.term)

    def leads(self, times: LeaseTimes) -> None:
        """Note that a leader begins to decide."""
        lessor = self._of(times)
        if lessor is not None:
            member = self.member(lessor._node.settings.member_id)
            self._everywhere(self._now(), op="lead", i=member, term=lessor._term)
            self._leads = self._leads or member == self._leader

    # -- entries

    def applied(self, applier: Applier, kind: str, lease_id: int, decided: int, ttl_s: int = 0) -> None:
        """Note that a member has applied an entry about a lease."""
        lessor = self._of(applier.rights)
        if lessor is None:
            return
        at, index = self._now(), applier.index
        lease = self._leases.get(lease_id)
        if lease is None:
            if (kind, ttl_s) != ("grant", TTL_S) or len(self._leases) == WINDOWS_MAX:
                return
            window = {"from": at, "term": self._term, "leader": self._leader, "leads": self._leads}
            self._windows.append(window | {"lines": [], "over": False})
            lease = self._leases[lease_id] = _Lease(self._windows[-1])
        if not lease.indexes or index > lease.indexes[-1]:
            lease.indexes.append(index)
            proposed_at = lease.proposed_at.get(decided, at) - lease.window["from"] + US + ROUNDING_US
            entry = {"kind": kind, "decided": decided, "term": applier.term, "at": proposed_at}
            self._line(lease, at, op="append", entry=entry)
        member = self.member(lessor._node.settings.member_id)
        exists = applier.leases.exists(lease_id)
        self._line(lease, at, op="apply", i=member, k=lease.known_at(index), exists=exists)

    # -- decisions

    def decides(self, lessor: Lessor, kind: int, lease_ids: Sequence[int]) -> None:
        """Note that a leader proposes renewals or ends."""
        if self._of(lessor) is None:
            return
        member, at = self.member(lessor._node.settings.member_id), self._now()
        for lease_id in lease_ids:
            if (lease := self._leases.get(lease_id)) is not None:
                if DECISIONS[kind] == "renew":
                    lease.proposed_at[lessor._term] = at
                self._line(lease, at, op=DECISIONS[kind], i=member, term=lessor._term)

    def kept(self, times: LeaseTimes, lease_id: int, verdict: int) -> None:
        """Note a keep-alive that renews."""
        lessor, lease = self._of(times), self._leases.get(lease_id)
        if lessor is not None and lease is not None and verdict in (FRESH, UNLOGGED):
            member = self.member(lessor._node.settings.member_id)
            told = {"isFresh": verdict == FRESH, "isConfirmed": self.is_confirmed}
            self._line(lease, self._now(), op="keep", i=member, **told)

    def shortened(self, lease_id: int) -> None:
        """End the window of a lease whose connection broke."""
        if lease_id in self._leases:
            self._leases[lease_id].window["over"] = True

    def received(self, times: LeaseTimes) -> None:
        """Note when a member begins to receive a database."""
        lessor = self._of(times)
        if lessor is not None:
            self._received[lessor._node.settings.member_id] = self._now()


def _plant_members(trace: Trace, patches: Patches) -> None:
    def begin(cluster: Cluster, *arguments: Any, **more: Any) -> None:
        trace.begin(cluster)
        found(cluster, *arguments, **more)

    def make(lessor: Lessor, *arguments: Any, **more: Any) -> None:
        init(lessor, *arguments, **more)
        trace.starts(lessor)

    def reloaded(times: LeaseTimes, granted: dict[int, int]) -> None:
        reload(times, granted)
        lessor = trace._of(times)
        if lessor is not None:
            trace.starts(lessor)

    def receive(times: LeaseTimes, granted: dict[int, int]) -> Generator[None, None, None]:
        trace.received(times)
        yield from read(times, granted)

    def crash(member: Member, *, power: bool) -> None:
        trace.dies(member.id)
        die(member, power=power)

    def become_leader(raft: Raft) -> None:
        win(raft)
        trace.elected(raft)

    def promote(times: LeaseTimes, *, after_outage: bool = False) -> None:
        decide(times, after_outage=after_outage)
        trace.leads(times)

    found = patches.set(Cluster, "__init__", begin)
    init = patches.set(Lessor, "__init__", make)
    reload = patches.set(LeaseTimes, "reloaded", reloaded)
    read = patches.set(LeaseTimes, "receive", receive)
    die = patches.set(Member, "crash", crash)
    win = patches.set(Raft, "become_leader", become_leader)
    decide = patches.set(LeaseTimes, "promote", promote)


def _plant_entries(trace: Trace, patches: Patches) -> None:
    def grant(applier: Applier, request: Any) -> Any:
        outcome = give(applier, request)
        trace.applied(applier, "grant", request.ID, applier.term, request.TTL)
        return outcome

    def renew(applier: Applier, decision: Any) -> Any:
        try:
            return keep(applier, decision)
        finally:
            for lease_id in decision.ids:
                trace.applied(applier, "renew", lease_id, decision.term)

    def end(applier: Applier, decision: Any) -> Any:
        deciding.append(decision.term)
        try:
            return expire(applier, decision)
        except Exception:
            for lease_id in decision.ids:
                trace.applied(applier, "expire", lease_id, decision.term)
            raise
        finally:
            deciding.pop()

    def in_pieces(applier: Applier, lease_ids: Sequence[int], expired: bool) -> Any:
        decided = deciding[-1] if deciding else applier.term
        return ends(applier, lease_ids, expired, decided)

    def ends(applier: Applier, lease_ids: Sequence[int], expired: bool, decided: int) -> Any:
        outcome = yield from pieces(applier, lease_ids, expired)
        for lease_id in lease_ids:
            trace.applied(applier, "expire" if expired else "revoke", lease_id, decided)
        return outcome

    deciding: list[int] = []
    give = patches.set(Applier, "_lease_grant", grant)
    keep = patches.set(Applier, "_lease_renew", renew)
    expire = patches.set(Applier, "_lease_expire", end)
    pieces = patches.set(Applier, "_end_leases_in_pieces", in_pieces)


def _plant_decisions(trace: Trace, patches: Patches) -> None:
    def propose(lessor: Lessor, kind: int, lease_ids: Sequence[int], done: Any) -> None:
        trace.decides(lessor, kind, lease_ids)
        submit(lessor, kind, lease_ids, done)

    def renew(times: LeaseTimes, lease_id: int) -> int:
        verdict = int(keep(times, lease_id))
        trace.kept(times, lease_id, verdict)
        return verdict

    def shorten(times: LeaseTimes, lease_id: int, *arguments: Any) -> Any:
        left_s = cut(times, lease_id, *arguments)
        if left_s is not None:
            trace.shortened(lease_id)
        return left_s

    def confirmed(name: str) -> None:
        def call(renewals: Renewals, *arguments: Any) -> None:
            before, trace.is_confirmed = trace.is_confirmed, True
            try:
                inner(renewals, *arguments)
            finally:
                trace.is_confirmed = before

        inner = patches.set(Renewals, name, call)

    submit = patches.set(Lessor, "_propose", propose)
    keep = patches.set(LeaseTimes, "renew", renew)
    cut = patches.set(LeaseTimes, "shorten", shorten)
    confirmed("take")
    confirmed("_logged")


@contextlib.contextmanager
def recording() -> Iterator[Traces]:
    """Record all simulations that begin while the context lasts, one after the other."""
    traces, patches = Traces(), Patches()
    trace = Trace(traces)
    for plant in (_plant_members, _plant_entries, _plant_decisions):
        plant(trace, patches)
    try:
        yield traces
    finally:
        patches.undo()
