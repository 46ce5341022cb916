"""Who of a cluster may run: the rule by which runs share its slots. Pure.

::

    ledger = claim(ledger, "job", nodes, min_nodes=2, max_nodes=4)       # what a run would like
    ledger = admit(ledger, hosts)                                        # who gets what, now
    ledger.find("job").granted                                           # () : it waits

The rule:

1. *All or nothing.* A run that waits is granted ``min_nodes`` of its nodes at once, or none. It holds nothing while it
   waits, so two runs never wait for each other.
2. *Fair shares.* A free slot goes to the run with the fewest slots for its weight, among equals to the run that
   came first. Runs that have their minimum grow node by node, after those that wait.
3. *No run waits for ever.* Smaller runs may be served before a big one that does not fit yet; after
   ``PASSED_OVER_MAX`` times it *reserves* the hosts of one set of nodes that would do: what becomes free there is kept
   for it. Once those who hold slots there have given them back, it runs.
4. *No grant is revoked.* A granted node stays granted until its run gives it back. So slots are never overcommitted by
   a grant; they are only if a host is said to have fewer afterwards.

A host has the slots that its own ``host/`` key says, else those that a run has declared, else as many as the run with
the most nodes there would use, so that a host of which nothing is known serves one such run at a time.

A run that can never be served (it asks for more than its hosts have, or has too few nodes yet) delays no other run.
Doing any of this twice changes nothing the second time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import ClassVar, Final

from raftkv.client.records import NUMBER_MAX, Record, RecordError
from raftkv.training.records import CLUSTER_ROOT, TrainingRecord

# -- record ---------------------------------------------------------------------------------------------------------
#
# What the runs of a cluster have agreed on: the ledger, one record, and where it is kept. Pure.
#
# ::
#
#     /raftkv/train-cluster/<cluster>/deny/<host>          leased; the host is left out (see ``denylist``)
#     /raftkv/train-cluster/<cluster>/host/<host>          leased, optional; {"slots": 8}: what the host has
#     /raftkv/train-cluster/<cluster>/ledger               who has claimed what, who was granted what
#     /raftkv/train-cluster/<cluster>/strike/<host>/<id>   leased; a fault that the host caused
#
# The ledger holds one *claim* a run: the nodes that would take part, in the order in which the run prefers them, and
# which of them have been granted their slots. Who holds, who waits and who wants more is all in that.
#
# Invariants of a claim, checked when it is read: either no node is granted (the run waits), or between ``min_nodes``
# and ``max_nodes`` of its nodes are. A writer of the ledger compares its mod_revision; the functions
# below decide the change.


class ClusterKeys:
    """The keys that the runs of one cluster share.

    Attributes:
        base: before everything of the cluster.
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
    """A node that would take part: it runs on ``slots`` slots of ``host``."""

    NAME: ClassVar[str] = "claim"
    id: str
    host: str
    slots: int = 1


@dataclass(frozen=True, slots=True)
class Claim(TrainingRecord):
    """The slots that one run wants, and those that it has.

    Attributes:
        run: its id.
        since: place in the order of arrival; it stays with the run until it withdraws.
        weight: its share, beside those of others.
        min_nodes, max_nodes: it can run with so many.
        nodes: those that would take part, the run's order of preference.
        granted: ids of those that may run.
        passed: how often others were served that came behind it, on hosts that it waits for.
    """

    NAME: ClassVar[str] = "claim"
    PARTS: ClassVar[Mapping[str, type[Record]]] = {"nodes": Need}
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
        """Nothing of it may run yet."""
        return not self.granted

    @property
    def is_complete(self) -> bool:
        """No slot could be of use to it."""
        return len(self.granted) >= min(self.max_nodes, len(self.nodes))

    @property
    def holding(self) -> tuple[Need, ...]:
        """The nodes that may run."""
        granted = set(self.granted)
        return tuple(need for need in self.nodes if need.id in granted)

    @property
    def wanting(self) -> tuple[Need, ...]:
        """The others."""
        granted = set(self.granted)
        return tuple(need for need in self.nodes if need.id not in granted)

    def check(self) -> None:
        """Implement ``Record.check``: the nodes fit together."""
        for name in ("weight", "min_nodes", "max_nodes"):
            self.check_number(name, getattr(self, name), 1, NUMBER_MAX)
        ids, granted = {need.id for need in self.nodes}, set(self.granted)
        if len(ids) != len(self.nodes) or len(granted) != len(self.granted) or not granted <= ids:
            raise RecordError(self.NAME, f"the nodes of run {self.run!r} do not fit together")
        if granted and not self.min_nodes <= len(granted) <= self.max_nodes:
            raise RecordError(self.NAME, f"run {self.run!r} was granted {len(granted)} nodes")


@dataclass(frozen=True, slots=True)
class Ledger(TrainingRecord):
    """All claims of a cluster.

    Attributes:
        claims: in the order of arrival.
        declared: slots of hosts, as runs have said.
        arrivals: claims that ever came; the next one's ``since``.
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
            self.check_number(host, slots, 0, NUMBER_MAX)


@dataclass(frozen=True, slots=True)
class HostRecord(TrainingRecord):
    """The slots that a host declares itself."""

    NAME: ClassVar[str] = "host"
    slots: int


def read_hosts(items: Iterable[tuple[str, bytes]]) -> dict[str, int]:
    """Decode the slots of hosts from their ``host/`` keys; one that cannot be read counts as not written."""
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
"""After so many times a run reserves what it needs."""


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
    """Put down what a run wants now; it keeps its place in the order, and the grants of nodes that are still named.

    Arguments:
        ledger: before it.
        run: its id.
        nodes: all that would take part, those that run now included; what is not named is given back.
        min_nodes, max_nodes: it can run with so many. If fewer than the minimum keep their grants, none does.
        weight: its share.
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
    """Give back slots: of some nodes, which do not take part any more, or all of the run, which then has no claim.

    Arguments:
        ledger: before it.
        run: its id.
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
        ledger: before it.
        runs: their ids.
    """
    if not any(claim.run in runs for claim in ledger.claims):
        return ledger
    left = [claim for claim in ledger.claims if claim.run not in runs]
    return _tidy(left, ledger.declared, ledger.arrivals)


def _kept(old: Claim | None, nodes: Sequence[Need], max_nodes: int) -> tuple[str, ...]:
    """Grants that stay: of nodes that are still named, with the same slots."""
    holding = set(old.holding) if old else set()
    return tuple(need.id for need in nodes if need in holding)[:max_nodes]


def _others(ledger: Ledger, run: str) -> list[Claim]:
    return [claim for claim in ledger.claims if claim.run != run]


def _tidy(claims: Iterable[Claim], declared: Mapping[str, int], arrivals: int) -> Ledger:
    """Put claims in the order of arrival, and forget hosts that no claim names: the record does not grow with time."""
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
        """Return those who could use something: first who reserves, then by share."""
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
    """Tell whether what becomes free is kept for a run."""
    return claim.waits and claim.passed >= PASSED_OVER_MAX


def _turn(claim: Claim, more_slots: int = 0) -> tuple[Fraction, int]:
    """Return a sort key: who has the smallest is served first."""
    return Fraction(sum(need.slots for need in claim.holding) + more_slots, claim.weight), claim.since


def _gang(claim: Claim, free: Mapping[str, int]) -> list[Need]:
    """Choose ``min_nodes`` of a run's nodes that fit together, the preferred ones if they do; none if none do."""
    preferred = _fitting(claim.nodes, free, claim.min_nodes)
    if len(preferred) < claim.min_nodes:
        # Of each host the smallest: no other choice lets more nodes in, so if this fails nothing fits.
        preferred = _fitting(sorted(claim.nodes, key=lambda need: need.slots), free, claim.min_nodes)
    return preferred if len(preferred) == claim.min_nodes else []


def _growth(claim: Claim, free: Mapping[str, int], rivals: Sequence[Claim]) -> list[Need]:
    """More nodes of a run that has its minimum: at least one if one fits, then more until it is a rival's turn."""
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
    """Return the runs that wait and can be served one day, in the order in which they are considered.

    Arguments:
        ledger: the claims.
        hosts: slots of hosts, as their own keys say.
    """
    room = capacity(ledger, hosts)
    waiting = [claim for claim in ledger.claims if claim.waits and _gang(claim, room)]
    return sorted(waiting, key=lambda claim: (not reserves(claim), claim.since))


def why(ledger: Ledger, run: str, hosts: Mapping[str, int]) -> str:
    """Explain why a run waits, in one line; empty: it does not.

    Arguments:
        ledger: the claims.
        run: its id.
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
