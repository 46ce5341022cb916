"""A cluster as people look at it: hosts, who holds their slots, who waits, who is left out. Only reads.

::

    view = await describe_cluster(kv, "gpu")
    for host in view.hosts:
        print(host.host, host.free, "of", host.slots, host.held)          # h1 0 of 8 {'bert': 8}
    for waiting in view.queue:
        print(waiting.place, waiting.run, waiting.reason)

Owns nothing; the queue is shown in the order in which slots that become free are handed out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from raftkv.client.kv.operations import GetRange
from raftkv.training.keys import CLUSTER_ROOT, RunKeys, check_cluster
from raftkv.training.scheduling import admission
from raftkv.training.scheduling.denylist import read_denial
from raftkv.training.scheduling.record import Claim, ClusterKeys, Ledger, read_hosts, slots_by_host

if TYPE_CHECKING:
    from raftkv.client.library import Client
    from raftkv.client.values import KeyValue

_RUNS_PER_TXN = 100


@dataclass(frozen=True, slots=True)
class HostView:
    """A host that runs have claimed slots of, or that is known otherwise.

    Attributes:
        host: its name.
        slots: that it has.
        source: who says so: ``host`` itself, a run that ``declared`` it, or ``assumed`` from what is claimed.
        held: slots by run.
        strikes: faults that it caused lately.
        denied: why it is left out; empty: it is not.
    """

    host: str
    slots: int
    source: str
    held: Mapping[str, int] = field(default_factory=dict)
    strikes: int = 0
    denied: str = ""

    @property
    def free(self) -> int:
        """Slots that nobody holds."""
        return max(self.slots - sum(self.held.values()), 0)


@dataclass(frozen=True, slots=True)
class GrantView:
    """A run that may run: its slots by host, of how many nodes, and what it could still use.

    Attributes:
        alive: it has nodes; False: its slots are free for whoever asks.
    """

    run: str
    weight: int
    slots: Mapping[str, int]
    nodes: int
    min_nodes: int
    max_nodes: int
    candidates: int
    alive: bool


@dataclass(frozen=True, slots=True)
class WaitingView:
    """A run that waits.

    Attributes:
        place: in line, from 1; 0: it cannot be served, and is in nobody's way.
        nodes: that are there.
        hosts: that it would run on.
        passed: how often others were served that came behind it.
        reserves: what becomes free is kept for it.
        reason: in one line.
    """

    place: int
    run: str
    weight: int
    min_nodes: int
    max_nodes: int
    nodes: int
    hosts: tuple[str, ...]
    passed: int
    reserves: bool
    reason: str
    alive: bool


@dataclass(frozen=True, slots=True)
class ClusterView:
    """A cluster, as of one revision (whether runs are alive: a moment later)."""

    cluster: str
    revision: int
    hosts: tuple[HostView, ...] = ()
    grants: tuple[GrantView, ...] = ()
    queue: tuple[WaitingView, ...] = ()

    def to_plain(self) -> dict[str, Any]:
        """Convert to what JSON can hold."""
        plain = asdict(self)
        for shown, host in zip(plain["hosts"], self.hosts, strict=True):
            shown["free"] = host.free
        return plain


async def list_clusters(kv: Client) -> list[str]:
    """List the names of the clusters of which something is known.

    Raises:
        StatusError: the store did not answer.
    """
    page = await kv.range(CLUSTER_ROOT, prefix=True, keys_only=True)
    return sorted({item.key.decode(errors="replace").removeprefix(CLUSTER_ROOT).split("/")[0] for item in page})


async def describe_cluster(kv: Client, cluster: str) -> ClusterView:
    """Read a cluster.

    Arguments:
        kv: a client, whole, not a view.
        cluster: its name; one that nobody uses is empty.

    Raises:
        ConfigError: it cannot be a name.
        RecordError: the ledger holds something that raftkv did not write.
        StatusError: the store did not answer.
    """
    keys = ClusterKeys(check_cluster(cluster))
    page = await kv.range(keys.base, prefix=True)
    found = _Found(keys, page.items)
    alive = await _alive(kv, [claim.run for claim in found.ledger.claims])
    ledger = found.ledger
    grants = tuple(_grant_view(claim, alive) for claim in ledger.claims if not claim.waits)
    return ClusterView(cluster, page.revision, found.host_views(), grants, tuple(_queue(ledger, found.hosts, alive)))


class _Found:
    """What lies below a cluster, by kind."""

    def __init__(self, keys: ClusterKeys, items: Sequence[KeyValue]) -> None:
        by_name = {item.key.decode(errors="replace").removeprefix(keys.base): item.value for item in items}
        self.ledger = Ledger.decode(by_name["ledger"]) if "ledger" in by_name else Ledger()
        self.hosts = read_hosts(_below("host/", by_name).items())
        self.denials = {host: read_denial(host, value).reason for host, value in _below("deny/", by_name).items()}
        self.strikes = [name.split("/")[0] for name in _below("strike/", by_name)]

    def host_views(self) -> tuple[HostView, ...]:
        """Describe all hosts of which something is known."""
        room = admission.capacity(self.ledger, self.hosts)
        held: dict[str, dict[str, int]] = {}
        for claim in self.ledger.claims:
            for host, slots in slots_by_host(claim.holding).items():
                held.setdefault(host, {})[claim.run] = slots
        names = sorted({*room, *self.hosts, *self.denials, *self.strikes})
        return tuple(
            HostView(
                host=host,
                slots=self.hosts.get(host, room.get(host, 0)),
                source=self._source(host),
                held=held.get(host, {}),
                strikes=self.strikes.count(host),
                denied=self.denials.get(host, ""),
            )
            for host in names
        )

    def _source(self, host: str) -> str:
        return "host" if host in self.hosts else "declared" if host in self.ledger.declared else "assumed"


def _below(prefix: str, by_name: Mapping[str, bytes]) -> dict[str, bytes]:
    return {name.removeprefix(prefix): value for name, value in by_name.items() if name.startswith(prefix)}


async def _alive(kv: Client, runs: Sequence[str]) -> set[str]:
    alive: set[str] = set()
    for first in range(0, len(runs), _RUNS_PER_TXN):
        part = runs[first : first + _RUNS_PER_TXN]
        counts = [GetRange(RunKeys(run).nodes, prefix=True, count_only=True) for run in part]
        _, pages = await kv.txn().then(*counts).commit()
        alive.update(run for run, page in zip(part, pages, strict=True) if page.count)
    return alive


def _grant_view(claim: Claim, alive: set[str]) -> GrantView:
    return GrantView(
        run=claim.run,
        weight=claim.weight,
        slots=dict(sorted(slots_by_host(claim.holding).items())),
        nodes=len(claim.granted),
        min_nodes=claim.min_nodes,
        max_nodes=claim.max_nodes,
        candidates=len(claim.nodes),
        alive=claim.run in alive,
    )


def _queue(ledger: Ledger, hosts: Mapping[str, int], alive: set[str]) -> list[WaitingView]:
    queue = admission.queue(ledger, hosts)
    places = {claim.run: place for place, claim in enumerate(queue, start=1)}
    waiting = [*queue, *(claim for claim in ledger.claims if claim.waits and claim.run not in places)]
    return [
        WaitingView(
            place=places.get(claim.run, 0),
            run=claim.run,
            weight=claim.weight,
            min_nodes=claim.min_nodes,
            max_nodes=claim.max_nodes,
            nodes=len(claim.nodes),
            hosts=tuple(sorted({need.host for need in claim.nodes})),
            passed=claim.passed,
            reserves=admission.reserves(claim),
            reason=admission.why(ledger, claim.run, hosts),
            alive=claim.run in alive,
        )
        for claim in waiting
    ]
