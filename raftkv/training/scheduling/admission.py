"""The rule by which the runs of a cluster share its slots. Pure.

::

    ledger = claim(ledger, "job", nodes, min_nodes=2, max_nodes=4)       # what a run wants
    ledger = admit(ledger, hosts)                                        # grants slots
    ledger.find("job").granted                                           # () : it waits

The rule:

1. *All or nothing.* A waiting run is granted ``min_nodes`` of its nodes at once, or none. It holds no slots while it
   waits, so two runs never wait for each other.
2. *Fair shares.* A free slot goes to the run with the fewest slots relative to its weight; among equals, to the run
   that came first. Runs that have their minimum grow node by node, after the waiting runs.
3. *No run waits for ever.* Smaller runs may be served before a big one that does not fit yet. After
   ``PASSED_OVER_MAX`` times the big run *reserves* the hosts of one sufficient set of nodes: slots that become free
   there are kept for it. It runs once the holders of slots there have given them back.
4. *No grant is revoked.* A granted node stays granted until its run gives it back. So a grant never overcommits slots;
   this happens only if a host later declares fewer slots.

The number of a host's slots is given by its ``host/`` key, else by a run's declaration. Otherwise it is the number of
slots that the most demanding run there would use, so that an undeclared host serves one such run at a time.

A run that cannot be served (it asks for more than its hosts have, or has too few nodes yet) delays no other run. All
functions are idempotent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import ClassVar, Final

from raftkv.client.records import NUMBER_MAX, Limits, Record, RecordError
from raftkv.training.records import CLUSTER_ROOT, TrainingRecord

# -- record ---------------------------------------------------------------------------------------------------------
#
# The shared state of the runs of a cluster: the ledger, which is one record, and the keys. Pure.
#
# ::
#
#         /raftkv/train-cluster/<cluster>/deny/<host>          leased; the host is denied (see ``denylist``)
#     /raftkv/train-cluster/<cluster>/host/<host>          leased, optional; {"slots": 8}: slots of the host
#     /raftkv/train-cluster/<cluster>/ledger               claims and grants of all runs
#     /raftkv/train-cluster/<cluster>/strike/<host>/<id>   leased; a fault that the host caused
#
# The ledger has one *claim* per run: the candidate nodes, in the run's order of preference, and which of them have been
# granted their slots. From these follow which runs hold slots, wait, or want more.
#
# Invariants of a claim, checked when it is read: either no node is granted (the run waits), or between ``min_nodes``
# and ``max_nodes`` of its nodes are. A writer of the ledger compares its mod_revision; the functions
# below decide the change.


class ClusterKeys:
    """The keys that the runs of one cluster share.

    Attributes:
        base: prefix of all keys of the cluster.
        ledger: the ledger.
        hosts: prefix of the hosts that declare their slots.
        changes: the interval of the hosts and the ledger, and nothing else.
    """

    def __init__(self, cluster: str) -> None:
        self.cluster = cluster
        self.base = f"{CLUSTER_ROOT}{cluster}/"
        self.ledger = f"{self.base}ledger"
        self.hosts = f"{self.base}host/"
        self.changes = (self.hosts, f"{self.ledger}\0")


@dataclass(frozen=True, slots=True)
class Need(TrainingRecord):
    """A candidate node, which uses ``slots`` slots of ``host``."""

    NAME: ClassVar[str] = "claim"
    id: str
    host: str
    slots: int = 1


@dataclass(frozen=True, slots=True)
class Claim(TrainingRecord):
    """The slots that one run wants, and the granted ones.

    Attributes:
        run: run id.
        since: place in the order of arrival, kept until the run withdraws.
        weight: share of the run, relative to other runs.
        min_nodes, max_nodes: limits of the number of nodes.
        nodes: candidates, in the run's order of preference.
        granted: ids of the nodes that may run.
        passed: how often later runs were served before it, on hosts that it waits for.
    """

    NAME: ClassVar[str] = "claim"
    PARTS: ClassVar[Mapping[str, type[Record]]] = {"nodes": Need}
    LIMITS: ClassVar[Limits] = dict.fromkeys(("weight", "min_nodes", "max_nodes"), (1, NUMBER_MAX))
    run: str
    since: int
    weight: int = 1
    min_nodes: int = 1
    max_nodes: int = 1
    nodes: tuple[Need, ...] = ()
    granted: tuple[str, ...] = ()
    passed: int = 0

    @property
    def waits(self) -> bool:
        """Whether no node of the run may run yet."""
        return not self.granted

    @property
    def is_complete(self) -> bool:
        """Whether the run cannot use more slots."""
        return len(self.granted) >= min(self.max_nodes, len(self.nodes))

    @property
    def holding(self) -> tuple[Need, ...]:
        """The nodes that may run."""
        granted = set(self.granted)
        return tuple(need for need in self.nodes if need.id in granted)

    @property
    def wanting(self) -> tuple[Need, ...]:
        """The nodes that are not granted."""
        granted = set(self.granted)
        return tuple(need for need in self.nodes if need.id not in granted)

    def check(self) -> None:
        """Implement ``Record.check``: the nodes fit together."""
        ids, granted = {need.id for need in self.nodes}, set(self.granted)
        if len(ids) != len(self.nodes) or len(granted) != len(self.granted) or not granted <= ids:
            raise RecordError(self.NAME, f"the nodes of run {self.run!r} do not fit together")
        if granted and not self.min_nodes <= len(granted) <= self.max_nodes:
            raise RecordError(self.NAME, f"run {self.run!r} was granted {len(granted)} nodes")


@dataclass(frozen=True, slots=True)
class Ledger(TrainingRecord):
    """All claims of a cluster.

    Attributes:
        claims: claims in the order of arrival.
        declared: slots of hosts, as declared by runs.
        arrivals: number of claims so far; ``since`` of the next one.
    """

    NAME: ClassVar[str] = "ledger"
    PARTS: ClassVar[Mapping[str, type[Record]]] = {"claims": Claim}
    claims: tuple[Claim, ...] = ()
    declared: Mapping[str, int] = field(default_factory=dict)
    arrivals: int = 0

    def find(self, run: str) -> Claim | None:
        """Find the claim of a run."""
        return next((claim for claim in self.claims if claim.run == run), None)

    def check(self) -> None:
        """Implement ``Record.check``."""
        for host, slots in self.declared.items():
            if slots < 0:
                raise RecordError(self.NAME, f"{host} is {slots}")


@dataclass(frozen=True, slots=True)
class HostRecord(TrainingRecord):
    """The slots that a host declares itself."""

    NAME: ClassVar[str] = "host"
    slots: int


def read_hosts(items: Iterable[tuple[str, bytes]]) -> dict[str, int]:
    """Decode the slots of hosts from their ``host/`` keys; an unreadable key counts as absent."""
    hosts = {}
    for host, value in items:
        try:
            hosts[host] = HostRecord.decode(value).slots
        except RecordError:
            continue
    return hosts


def slots_by_host(needs: Iterable[Need]) -> Counter[str]:
    """Count the slots that nodes take, by host."""
    taken: Counter[str] = Counter()
    for need in needs:
        taken[need.host] += need.slots
    return taken


PASSED_OVER_MAX: Final = 3
"""How often a run may be passed over before it reserves hosts."""


# ---- what runs say


def claim(
    ledger: Ledger,
    run: str,
    nodes: Sequence[Need],
    min_nodes: int,
    max_nodes: int,
    *,
    weight: int = 1,
    declared: Mapping[str, int] | None = None,
) -> Ledger:
    """Record what a run wants now; it keeps its place in the order, and the grants of nodes that are still named.

    Arguments:
        ledger: ledger before the change.
        run: run id.
        nodes: all candidates, including nodes that run now; the slots of other nodes are given back.
        min_nodes, max_nodes: limits of the number of nodes. If fewer than the minimum keep their grants, none does.
        weight: share of the run.
        declared: slots of hosts, as the run knows them.
    """
    old = ledger.find(run)
    since = old.since if old else ledger.arrivals
    kept = _kept(old, nodes, max_nodes)
    new = Claim(
        run=run,
        since=since,
        weight=weight,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        nodes=tuple(nodes),
        granted=kept if len(kept) >= min_nodes else (),
        passed=old.passed if old and old.waits else 0,
    )
    arrivals = ledger.arrivals if old else ledger.arrivals + 1
    slots = {**ledger.declared, **(declared or {})}
    return _tidy([*_others(ledger, run), new], slots, arrivals)


def release(ledger: Ledger, run: str, node_ids: Collection[str] | None = None) -> Ledger:
    """Give back the slots of some nodes, or of the whole run, which then has no claim.

    Arguments:
        ledger: ledger before the change.
        run: run id.
        node_ids: None: all.
    """
    old = ledger.find(run)
    if old is None:
        return ledger
    if node_ids is None:
        return forget(ledger, (run,))
    nodes = [need for need in old.nodes if need.id not in node_ids]
    return claim(ledger, run, nodes, old.min_nodes, old.max_nodes, weight=old.weight)


def forget(ledger: Ledger, runs: Collection[str]) -> Ledger:
    """Drop the claims of runs that are gone.

    Arguments:
        ledger: ledger before the change.
        runs: run ids.
    """
    if not any(claim.run in runs for claim in ledger.claims):
        return ledger
    left = [claim for claim in ledger.claims if claim.run not in runs]
    return _tidy(left, ledger.declared, ledger.arrivals)


def _kept(old: Claim | None, nodes: Sequence[Need], max_nodes: int) -> tuple[str, ...]:
    """Return the grants that stay: those of nodes that are still named, with the same slots."""
    holding = set(old.holding) if old else set()
    return tuple(need.id for need in nodes if need in holding)[:max_nodes]


def _others(ledger: Ledger, run: str) -> list[Claim]:
    return [claim for claim in ledger.claims if claim.run != run]


def _tidy(claims: Iterable[Claim], declared: Mapping[str, int], arrivals: int) -> Ledger:
    """Sort claims by arrival, and drop hosts that no claim names, so that the record does not grow with time."""
    ordered = tuple(sorted(claims, key=lambda claim: claim.since))
    named = {need.host for claim in ordered for need in claim.nodes}
    return Ledger(ordered, {host: slots for host, slots in sorted(declared.items()) if host in named}, arrivals)


# ---- what they get


def capacity(ledger: Ledger, hosts: Mapping[str, int]) -> dict[str, int]:
    """Return the slots of every host that a claim names.

    Arguments:
        ledger: the claims.
        hosts: slots of hosts, as their own keys say.
    """
    wished: Counter[str] = Counter()
    for each in ledger.claims:
        wished |= slots_by_host(each.nodes)
    return {host: hosts.get(host, ledger.declared.get(host, slots)) for host, slots in sorted(wished.items())}


def admit(ledger: Ledger, hosts: Mapping[str, int]) -> Ledger:
    """Grant what can be granted.

    Arguments:
        ledger: the claims.
        hosts: slots of hosts, as their own keys say.
    """
    table = _Table(ledger, hosts)
    while table.grant_next():
        pass
    return replace(ledger, claims=table.claims())


class _Table:
    """The claims while slots are handed out."""

    def __init__(self, ledger: Ledger, hosts: Mapping[str, int]) -> None:
        self._claims = {claim.run: claim for claim in ledger.claims}
        self._capacity = capacity(ledger, hosts)
        self._free = Counter(self._capacity)
        for claim in ledger.claims:
            self._free.subtract(slots_by_host(claim.holding))
        self._targets = {claim.run: _gang(claim, self._capacity) for claim in ledger.claims if claim.waits}
        self._passed: set[str] = set()

    def grant_next(self) -> bool:
        """Serve one run; False: no run can be served."""
        free = Counter(self._free)
        behind: list[Claim] = []
        order = self._order()
        for index, claim in enumerate(order):
            picked = _gang(claim, free) if claim.waits else _growth(claim, free, order[index + 1 :])
            if picked:
                self._grant(claim, picked)
                self._note_passed(behind, picked)
                return True
            if claim.waits:
                behind.append(claim)
                if reserves(claim):
                    free.subtract(slots_by_host(self._targets[claim.run]))
        return False

    def claims(self) -> tuple[Claim, ...]:
        """Return the claims as they are now."""
        return tuple(
            replace(claim, passed=min(claim.passed + 1, PASSED_OVER_MAX)) if claim.run in self._passed else claim
            for claim in self._claims.values()
        )

    def _order(self) -> list[Claim]:
        """Return the claims that can use more slots: first those that reserve, then by share."""
        able = [claim for claim in self._claims.values() if not claim.is_complete and self._is_able(claim)]
        return sorted(able, key=lambda claim: (not reserves(claim), *_turn(claim)))

    def _is_able(self, claim: Claim) -> bool:
        return not claim.waits or bool(self._targets[claim.run])

    def _grant(self, claim: Claim, picked: Sequence[Need]) -> None:
        ids = {*claim.granted, *(need.id for need in picked)}
        granted = tuple(need.id for need in claim.nodes if need.id in ids)
        self._claims[claim.run] = replace(claim, granted=granted, passed=0)
        self._free.subtract(slots_by_host(picked))
        self._passed.discard(claim.run)

    def _note_passed(self, behind: Iterable[Claim], picked: Sequence[Need]) -> None:
        taken = {need.host for need in picked}
        for claim in behind:
            if taken & {need.host for need in claim.nodes}:
                self._passed.add(claim.run)


def reserves(claim: Claim) -> bool:
    """Return whether slots that become free are reserved for a run."""
    return claim.waits and claim.passed >= PASSED_OVER_MAX


def _turn(claim: Claim, more_slots: int = 0) -> tuple[Fraction, int]:
    """Return a sort key: the smallest is served first."""
    return Fraction(sum(need.slots for need in claim.holding) + more_slots, claim.weight), claim.since


def _gang(claim: Claim, free: Mapping[str, int]) -> list[Need]:
    """Choose ``min_nodes`` of a run's nodes that fit together, preferred ones first; empty: no such choice exists."""
    preferred = _fitting(claim.nodes, free, claim.min_nodes)
    if len(preferred) < claim.min_nodes:
        # The smallest nodes of each host: no other choice admits more nodes, so if this fails nothing fits.
        preferred = _fitting(sorted(claim.nodes, key=lambda need: need.slots), free, claim.min_nodes)
    return preferred if len(preferred) == claim.min_nodes else []


def _growth(claim: Claim, free: Mapping[str, int], rivals: Sequence[Claim]) -> list[Need]:
    """Choose more nodes of a run that has its minimum: one if it fits, then more until it is a rival's turn."""
    limit = _turn(rivals[0]) if rivals else None
    left = Counter(dict(free))
    picked: list[Need] = []
    taken = 0
    for need in claim.wanting:
        if len(claim.granted) + len(picked) == claim.max_nodes:
            break
        if picked and limit is not None and _turn(claim, taken) > limit:
            break
        if need.slots <= left[need.host]:
            left[need.host] -= need.slots
            taken += need.slots
            picked.append(need)
    return picked


def _fitting(needs: Iterable[Need], free: Mapping[str, int], count: int) -> list[Need]:
    left = Counter(dict(free))
    picked: list[Need] = []
    for need in needs:
        if len(picked) == count:
            break
        if need.slots <= left[need.host]:
            left[need.host] -= need.slots
            picked.append(need)
    return picked


# ---- explanations for people


def queue(ledger: Ledger, hosts: Mapping[str, int]) -> list[Claim]:
    """Return the waiting runs that their hosts can serve, in the order in which they are considered.

    Arguments:
        ledger: the claims.
        hosts: slots of hosts, as their own keys say.
    """
    room = capacity(ledger, hosts)
    waiting = [claim for claim in ledger.claims if claim.waits and _gang(claim, room)]
    return sorted(waiting, key=lambda claim: (not reserves(claim), claim.since))


def why(ledger: Ledger, run: str, hosts: Mapping[str, int]) -> str:
    """Return why a run waits, in one line; empty: it does not wait.

    Arguments:
        ledger: the claims.
        run: run id.
        hosts: slots of hosts, as their own keys say.
    """
    claim = ledger.find(run)
    if claim is None or not claim.waits:
        return ""
    if len(claim.nodes) < claim.min_nodes:
        return f"{len(claim.nodes)} of {claim.min_nodes} nodes are present"
    room = capacity(ledger, hosts)
    if not _gang(claim, room):
        short = sorted(host for host, slots in slots_by_host(claim.nodes).items() if slots > room[host])
        return f"it needs more slots than there are on {_some(short)}: start it with fewer, or declare the slots"
    wanted = {need.host for need in claim.nodes}
    holders = [other.run for other in ledger.claims if wanted & {need.host for need in other.holding}]
    place = 1 + queue(ledger, hosts).index(claim)
    reserving = ", and reserves what becomes free" if reserves(claim) else ""
    if not holders:
        return f"number {place} in line{reserving}"
    return f"number {place} in line for slots that {_some(holders)} hold{'s' if len(holders) == 1 else ''}{reserving}"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
