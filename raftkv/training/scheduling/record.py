"""What the runs of a cluster have agreed on: the ledger, one record, and where it is kept. Pure.

::

    /raftkv/train-cluster/<cluster>/deny/<host>          leased; the host is left out (see ``denylist``)
    /raftkv/train-cluster/<cluster>/host/<host>          leased, optional; {"slots": 8}: what the host has
    /raftkv/train-cluster/<cluster>/ledger               who has claimed what, who was granted what
    /raftkv/train-cluster/<cluster>/strike/<host>/<id>   leased; a fault that the host caused

The ledger holds one *claim* a run: the nodes that would take part, in the order in which the run prefers them, and
which of them have been granted their slots. Who holds, who waits and who wants more is all in that.

Invariants of a claim, checked when it is read: either no node is granted (the run waits), or between ``min_nodes`` and
``max_nodes`` of its nodes are. Who changes the ledger compares its mod_revision; what changes is decided in
``admission``.
"""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, cast

from raftkv.client.control.records import NUMBER_MAX, RecordError
from raftkv.training.keys import CLUSTER_ROOT
from raftkv.training.records import TrainingRecord


@dataclass(frozen=True, slots=True)
class ClusterKeys:
    """The keys that the runs of one cluster share."""

    cluster: str

    @property
    def base(self) -> str:
        """Before everything of the cluster."""
        return f"{CLUSTER_ROOT}{self.cluster}/"

    @property
    def ledger(self) -> str:
        """The ledger."""
        return f"{self.base}ledger"

    @property
    def hosts(self) -> str:
        """Prefix of the hosts that tell themselves what they have."""
        return f"{self.base}host/"

    @property
    def changes(self) -> tuple[str, str]:
        """The interval of the hosts and the ledger, and nothing else."""
        return self.hosts, f"{self.ledger}\0"


@dataclass(frozen=True, slots=True)
class Need(TrainingRecord):
    """A node that would take part: it runs on ``slots`` slots of ``host``."""

    NAME: ClassVar[str] = "claim"
    id: str
    host: str
    slots: int = 1


@dataclass(frozen=True, slots=True)
class Claim(TrainingRecord):
    """What one run wants, and what it has.

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

    @classmethod
    def read_field(cls, name: str, kind: str, value: object) -> object:
        """Implement ``Record.read_field``."""
        if name == "run":
            return super(Claim, cls).read_field(name, kind, value)
        if name == "nodes" and isinstance(value, list):
            return tuple(Need.from_plain(item) for item in value)
        if name == "granted" and isinstance(value, list):
            return tuple(str(super(Claim, cls).read_field(name, "str", item)) for item in value)
        if kind == "int":
            return _number(cls.NAME, name, value, least=1 if name in ("weight", "min_nodes", "max_nodes") else 0)
        raise RecordError(cls.NAME, f"{name} is {reprlib.repr(value)}")


@dataclass(frozen=True, slots=True)
class Ledger(TrainingRecord):
    """All claims of a cluster.

    Attributes:
        claims: in the order of arrival.
        declared: slots of hosts, as runs have said.
        arrivals: claims that ever came; the next one's ``since``.
    """

    NAME: ClassVar[str] = "ledger"
    claims: tuple[Claim, ...] = ()
    declared: Mapping[str, int] = field(default_factory=dict)
    arrivals: int = 0

    def find(self, run: str) -> Claim | None:
        """Find the claim of a run."""
        return next((claim for claim in self.claims if claim.run == run), None)

    @classmethod
    def read_field(cls, name: str, kind: str, value: object) -> object:
        """Implement ``Record.read_field``."""
        if name == "claims" and isinstance(value, list):
            return tuple(_sound(Claim.from_plain(item)) for item in value)
        if name == "declared" and isinstance(value, dict):
            checked = super(Ledger, cls).read_field(name, "Mapping[str, Any]", value)
            return {host: _number(cls.NAME, host, slots) for host, slots in cast("dict[str, object]", checked).items()}
        if name == "arrivals":
            return _number(cls.NAME, name, value)
        raise RecordError(cls.NAME, f"{name} is {value!r}")


@dataclass(frozen=True, slots=True)
class HostRecord(TrainingRecord):
    """What a host says of itself."""

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


def _number(record: str, name: str, value: object, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= NUMBER_MAX:
        raise RecordError(record, f"{name} is {reprlib.repr(value)}")
    return value


def _sound(claim: Claim) -> Claim:
    ids = {need.id for need in claim.nodes}
    granted = set(claim.granted)
    if len(ids) != len(claim.nodes) or len(granted) != len(claim.granted) or not granted <= ids:
        raise RecordError(Claim.NAME, f"the nodes of run {claim.run!r} do not fit together")
    if granted and not claim.min_nodes <= len(granted) <= claim.max_nodes:
        raise RecordError(Claim.NAME, f"run {claim.run!r} was granted {len(granted)} nodes")
    return claim
