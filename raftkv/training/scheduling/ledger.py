"""The ledger of a cluster, as the arbiter of one run uses it: request slots, follow changes, give slots back.

::

    admission = ClusterAdmission(control, "gpu", weight=2, on_change=ask_again)
    granted = await admission.request("job", candidates, min_nodes=2, max_nodes=4)
    if not granted:
        print(admission.reason)                     # number 2 in line for slots that bert-large holds
    await admission.release("job")

The ledger is one record. Every run changes it by compare-and-set of its mod_revision, following the pure rule in
``admission``. No process owns it: each change also grants free slots to all runs in the same write. So a waiting run
finds its grant in the ledger, and its callback is called.

Invariants:

1. Every method is idempotent, and safe to repeat after an error with an unknown outcome.
2. A run is removed only in a txn with the condition that it has no ``node/`` key with a lease.
   A run without a ``node/`` key gets no slots.
3. A wake-up is never lost: the watch of the ledger starts at the revision that was read, and those of other runs'
   nodes list what is there when they start.
4. Without changes nothing is written and nothing is read.

A run whose nodes all die at once cannot give its slots back. So waiting runs watch the nodes of the runs in front of
them, and remove a run whose last node is gone. Its slots may then be granted while one of its processes still runs
without having noticed the loss of its lease: as within a run, a node without a lease counts as gone.

A run whose nodes this user may not read counts as alive; a run of its own team, or of root, removes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from raftkv.client.control import ClientControl, Control, Reflector, below, until_answered
from raftkv.client.operations import Compare, Delete, Get, GetRange, Operation, Put, create_revision, mod_revision
from raftkv.client.records import RecordError, number_in
from raftkv.client.values import PUT, Event, KeyValue
from raftkv.errors import PermissionDeniedError, StatusError
from raftkv.training.records import (
    CLUSTER_ROOT,
    DESERTED_MAX,
    SLOTS_MAX,
    Node,
    RunKeys,
    check_cluster,
    is_cluster,
    reads_of_nodes,
)
from raftkv.training.scheduling import admission
from raftkv.training.scheduling.admission import Claim, ClusterKeys, Ledger, Need, read_hosts, slots_by_host
from raftkv.training.scheduling.denylist import read_denial

if TYPE_CHECKING:
    from raftkv.client.library import Client

HOST_SLOTS: Final = "host_slots"
"""Name in a node's ``data``: how many slots its host has for all runs together."""

GIVE_BACK_S: Final = 1.0
"""Time limit for giving slots back, so that a leaving node does not wait for a store that does not answer."""

Update = Callable[[Ledger], Ledger]


@dataclass(frozen=True, slots=True)
class _Seen:
    """The ledger, as read.

    Attributes:
        ledger, version: the record and its mod_revision; 0: absent.
        hosts: slots that hosts declare themselves.
        items: the keys of ledger and hosts.
        revision: store revision when they were read.
        dead: runs without nodes.
    """

    ledger: Ledger
    version: int
    hosts: Mapping[str, int]
    items: Sequence[KeyValue]
    revision: int
    dead: tuple[str, ...]


class ClusterAdmission:
    """One run's access to the ledger of its cluster.

    Arguments:
        control: the store.
        cluster: cluster name.
        weight: share of the run, relative to other runs.
        on_change: called, on the loop, when the answer to a request may have changed; None: nothing is watched.

    Attributes:
        reason: why the last ``request`` returned no nodes, in one line.
    """

    def __init__(
        self, control: Control, cluster: str, *, weight: int = 1, on_change: Callable[[], None] | None = None
    ) -> None:
        self.reason = ""
        self._control = control
        self._keys = ClusterKeys(check_cluster(cluster))
        self._weight = weight
        self._answers: dict[str, tuple[str, ...]] = {}
        self._on_change = on_change
        self._reflector: Reflector | None = None
        self._runs: dict[str, Reflector] = {}
        self._hidden: set[str] = set()
        """Runs whose nodes this user may not read."""

    async def request(
        self, run_id: str, candidates: Sequence[Node], min_nodes: int, max_nodes: int, guards: Sequence[Compare] = ()
    ) -> tuple[str, ...]:
        """Claim slots for candidate nodes, and return the nodes that may run now.

        Arguments:
            run_id: run id.
            candidates: all candidate nodes in the order of preference, including nodes that run now; the slots of other
                nodes are given back.
            min_nodes, max_nodes: limits of the number of nodes.
            guards: conditions for any change, such as that this node is still the arbiter.

        Returns:
            The nodes that may run; none: the run waits in the queue, or the guards do not hold.
            ``on_change`` says when to ask again.

        Raises:
            RecordError: the ledger holds something that raftkv did not write.
            StatusError: the store did not answer; ask again.
        """
        needs = [Need(each.id, each.host, each.slots) for each in candidates]
        declared = _declared(candidates)

        def update(ledger: Ledger) -> Ledger:
            return admission.claim(ledger, run_id, needs, min_nodes, max_nodes, weight=self._weight, declared=declared)

        is_there = create_revision(RunKeys(run_id).nodes, prefix=True) > 0
        seen, ledger = await self._change(update, (is_there, *guards))
        claim = ledger.find(run_id) if ledger else None
        if ledger is None or claim is None:
            self.reason = "this node is no longer the arbiter of the run"
            return ()
        self._answers[run_id] = claim.granted
        self._follow(run_id, seen, ledger)
        self.reason = admission.why(ledger, run_id, seen.hosts)
        return claim.granted

    async def release(
        self, run_id: str, node_ids: Collection[str] | None = None, guards: Sequence[Compare] = ()
    ) -> None:
        """Give slots back; other runs get them in the same write.

        Arguments:
            run_id: run id.
            node_ids: nodes that no longer take part; None: all nodes, and the place in the queue.
            guards: as for ``request``.

        Raises:
            RecordError, StatusError: as for ``request``.
        """
        _, ledger = await self._change(lambda ledger: admission.release(ledger, run_id, node_ids), guards)
        claim = ledger.find(run_id) if ledger else None
        if claim is not None:
            self._answers[run_id] = claim.granted
        elif ledger is not None:
            self._answers.pop(run_id, None)
            self._stop_watching(keep=())

    def close(self) -> None:
        """Stop watching; claims stay."""
        self._stop_watching(keep=())
        if self._reflector is not None:
            self._reflector.close()
            self._reflector = None

    # ---- reading and writing

    async def _change(self, update: Update, guards: Sequence[Compare]) -> tuple[_Seen, Ledger | None]:
        """Change the ledger; return it before and after the change; None: the guards do not hold."""
        while True:
            seen = await self._read()
            dead = seen.dead[:DESERTED_MAX]
            ledger = admission.admit(update(admission.forget(seen.ledger, dead)), seen.hosts)
            if ledger == seen.ledger:
                return seen, ledger
            written = await self._control.txn([*self._unchanged(seen), *_gone(dead), *guards], self._writes(ledger))
            if written.succeeded:
                return seen, ledger
            if guards and not (await self._control.txn(guards, (Get(self._keys.ledger),))).succeeded:
                return seen, None

    async def _read(self) -> _Seen:
        answer = await self._control.txn((), (Get(self._keys.ledger), GetRange(self._keys.hosts, prefix=True)))
        item, page = answer.results
        ledger = Ledger.decode(item.value) if item else Ledger()
        named = ((each.key.decode(errors="replace").removeprefix(self._keys.hosts), each.value) for each in page)
        hosts = read_hosts(named)
        dead = tuple(await _deserted(self._control, [claim.run for claim in ledger.claims], self._hidden))
        items = [*page, item] if item else list(page)
        return _Seen(ledger, item.mod_revision if item else 0, hosts, items, answer.revision, dead)

    def _unchanged(self, seen: _Seen) -> list[Compare]:
        return [
            mod_revision(self._keys.ledger) == seen.version,
            mod_revision(self._keys.hosts, prefix=True) < seen.revision + 1,
        ]

    def _writes(self, ledger: Ledger) -> list[Operation]:
        """Return the writes of the ledger; without claims its key is deleted."""
        return [Put(self._keys.ledger, ledger.encode()) if ledger.claims else Delete(self._keys.ledger)]

    # ---- hearing of changes

    def _follow(self, run_id: str, seen: _Seen, ledger: Ledger) -> None:
        """Watch the keys that may change the answer, from the revision that was read."""
        if self._on_change is None:
            return
        if self._reflector is None:
            self._reflector = Reflector(self._control, self._keys.changes, self._on_ledger)
            self._reflector.start(seen.items, seen.revision)
        claim = ledger.find(run_id)
        could_get_more = claim is not None and not claim.is_complete
        known = {run_id, *self._hidden}
        others = [each.run for each in ledger.claims if each.run not in known] if could_get_more else []
        self._stop_watching(keep=others)
        for run in others:
            if run not in self._runs:
                self._runs[run] = Reflector(self._control, below(RunKeys(run).nodes), partial(self._on_nodes, run))
                self._runs[run].start()

    def _on_ledger(self, changes: Sequence[Event]) -> None:
        if self._on_change is not None and any(map(self._concerns, changes)):
            self._on_change()

    def _concerns(self, event: Event) -> bool:
        if event.key != self._keys.ledger.encode():
            return True  # a host was added, removed or changed
        try:
            ledger = Ledger.decode(event.value) if event.type == PUT else Ledger()
        except RecordError:
            return True
        claims = {run: ledger.find(run) for run in self._answers}
        if any(claim is None or claim.granted != self._answers[run] for run, claim in claims.items()):
            return True
        # A run that came later can die while it holds slots, so it is watched as well.
        complete = all(claim is not None and claim.is_complete for claim in claims.values())
        known = {*self._runs, *self._answers, *self._hidden}
        return not complete and not {claim.run for claim in ledger.claims} <= known

    def _on_nodes(self, run: str, changes: Sequence[Event]) -> None:
        """Detect that the last node of another run is gone; the next request may take its slots."""
        if run in self._runs and not any(item.lease for item in self._runs[run].items.values()):
            self._runs.pop(run).close()
            if self._on_change is not None:
                self._on_change()

    def _stop_watching(self, keep: Collection[str]) -> None:
        for run in [run for run in self._runs if run not in keep]:
            self._runs.pop(run).close()


async def _deserted(control: Control, runs: Sequence[str], hidden: set[str]) -> list[str]:
    """Return the runs without a node; those whose nodes the user may not read are added to ``hidden``, and left out."""
    found: list[str] = []
    for part, reads in reads_of_nodes(sorted({*runs} - hidden)):
        try:
            answer = await control.txn((), reads)
        except PermissionDeniedError:
            if len(part) == 1:
                hidden.update(part)
            else:
                for run in part:
                    found += await _deserted(control, [run], hidden)
        else:
            found += [run for run, result in zip(part, answer.results, strict=True) if result.succeeded]
    return found


async def give_back(control: Control, cluster: str, run_id: str) -> None:
    """Remove the claim of a run that has no nodes any more; called by the last node that leaves.

    If this fails nothing is lost: waiting runs detect that the run has no nodes.

    Arguments:
        control: the store.
        cluster: cluster name.
        run_id: run id.
    """
    deserted = [RunKeys(run_id).deserted]

    async def take_away() -> None:
        if (await control.txn(deserted, ())).succeeded:
            await ClusterAdmission(control, cluster).release(run_id, guards=deserted)

    try:
        async with asyncio.timeout(GIVE_BACK_S):
            await until_answered(take_away)
    except (TimeoutError, StatusError, RecordError):
        return


def _declared(candidates: Sequence[Node]) -> dict[str, int]:
    """Return the slots of hosts, as their nodes declare them; values that are not numbers are ignored."""
    said = {each.host: each.data.get(HOST_SLOTS, "") for each in candidates}
    return {host: slots for host, text in said.items() if (slots := number_in(text, SLOTS_MAX)) is not None}


def _gone(runs: Sequence[str]) -> list[Compare]:
    return [RunKeys(run).deserted for run in runs]


# -- view -----------------------------------------------------------------------------------------------------------
#
# A view of a cluster for people: hosts, holders of their slots, waiting runs, denied hosts. Only reads.
#
# ::
#
#     view = await describe_cluster(kv, "gpu")
#     for host in view.hosts:
#         print(host.host, host.free, "of", host.slots, host.held)          # h1 0 of 8 {'bert': 8}
#     for waiting in view.queue:
#         print(waiting.place, waiting.run, waiting.reason)
#
# The queue is in the order in which free slots are granted.


@dataclass(frozen=True, slots=True)
class HostView:
    """A host on which runs have claimed slots, or that is known in another way.

    Attributes:
        host: host name.
        slots: number of its slots.
        source: origin of the number: the ``host`` itself, a run that ``declared`` it, or ``assumed`` from the claims.
        held: slots by run.
        strikes: recent faults that it caused.
        denied: why it is denied; empty: it is not.
    """

    host: str
    slots: int
    source: str
    held: Mapping[str, int] = field(default_factory=dict)
    strikes: int = 0
    denied: str = ""

    @property
    def free(self) -> int:
        """Slots that no run holds."""
        return max(self.slots - sum(self.held.values()), 0)


@dataclass(frozen=True, slots=True)
class GrantView:
    """A run with granted slots: its slots by host, its nodes, and what it could still use.

    Attributes:
        alive: whether it has nodes; False: the next request may take its slots.
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
        place: position in the queue, from 1; 0: the hosts do not have enough slots for it, and it delays no other run.
        nodes: present nodes.
        hosts: hosts that it would run on.
        passed: how often later runs were served before it.
        reserves: slots that become free are reserved for it.
        reason: reason in one line.
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
    """A cluster, as of one revision; whether runs are alive was read a moment later."""

    cluster: str
    revision: int
    hosts: tuple[HostView, ...] = ()
    grants: tuple[GrantView, ...] = ()
    queue: tuple[WaitingView, ...] = ()

    def to_plain(self) -> dict[str, Any]:
        """Convert to values that JSON can hold."""
        plain = asdict(self)
        for shown, host in zip(plain["hosts"], self.hosts, strict=True):
            shown["free"] = host.free
        return plain


async def list_clusters(kv: Client) -> list[str]:
    """List the names of all known clusters.

    Raises:
        StatusError: the store did not answer.
    """
    page = await kv.range(CLUSTER_ROOT, prefix=True, keys_only=True)
    names = {item.key.decode(errors="replace").removeprefix(CLUSTER_ROOT).split("/")[0] for item in page}
    return sorted(filter(is_cluster, names))  # another client's key hides no cluster


async def describe_cluster(kv: Client, cluster: str) -> ClusterView:
    """Read a cluster.

    Arguments:
        kv: a client, not a view of one.
        cluster: cluster name; an unused one has an empty view.

    Raises:
        ConfigError: the name is not valid.
        RecordError: the ledger holds something that raftkv did not write.
        StatusError: the store did not answer.
    """
    keys = ClusterKeys(check_cluster(cluster))
    page = await kv.range(keys.base, prefix=True)
    found = _Found(keys, page.items)
    ledger = found.ledger
    runs = [claim.run for claim in ledger.claims]
    alive = {*runs} - {*await _deserted(ClientControl(kv), runs, set())}
    grants = tuple(_grant_view(claim, alive) for claim in ledger.claims if not claim.waits)
    return ClusterView(cluster, page.revision, found.host_views(), grants, tuple(_queue(ledger, found.hosts, alive)))


class _Found:
    """The keys below a cluster, by kind."""

    def __init__(self, keys: ClusterKeys, items: Sequence[KeyValue]) -> None:
        by_name = {item.key.decode(errors="replace").removeprefix(keys.base): item.value for item in items}
        self.ledger = Ledger.decode(by_name["ledger"]) if "ledger" in by_name else Ledger()
        self.hosts = read_hosts(_below("host/", by_name).items())
        self.denials = {host: read_denial(host, value).reason for host, value in _below("deny/", by_name).items()}
        self.strikes = [name.split("/")[0] for name in _below("strike/", by_name)]

    def host_views(self) -> tuple[HostView, ...]:
        """Describe all known hosts."""
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
