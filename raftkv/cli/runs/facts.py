"""A run as it is now, with what its waiting nodes wait for; for ``raftkvctl run show``.

Owns the reasons: every node that is there and in no running generation gets one line that says why.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from raftkv.client.control.records import RecordError
from raftkv.errors import PermissionDeniedError
from raftkv.training.history import read_history
from raftkv.training.keys import CLUSTER_ROOT, RunKeys
from raftkv.training.records import BROKEN, CLOSED, GATHERING, RUNNING, Fault, Member, Node, State, to_json
from raftkv.training.rendezvous.world import first_ranks
from raftkv.training.scheduling.admission import Ledger
from raftkv.training.scheduling.denylist import read_denial
from raftkv.training.scheduling.ledger import describe_cluster
from raftkv.training.timeline import GenerationHistory, RunHistory

if TYPE_CHECKING:
    from raftkv.client.library import Client
    from raftkv.client.values import KeyValue

FAULTS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Waiting:
    """A node that is there and in no running generation, and why not."""

    node: Node
    why: str


@dataclass(frozen=True, slots=True)
class Denied:
    """A host that is left out, for so many seconds more."""

    host: str
    reason: str
    seconds_left: int


@dataclass(frozen=True, slots=True)
class Queue:
    """Where a run stands with the cluster whose slots it shares with others.

    Attributes:
        cluster: its name.
        waits: it has no slots yet.
        reason: why not, in one line; empty: it has.
    """

    cluster: str
    waits: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """A run as it is now."""

    history: RunHistory
    waiting: tuple[Waiting, ...]
    denied: tuple[Denied, ...] = ()
    queue: Queue | None = None

    @property
    def run_id(self) -> str:
        """Id of the run."""
        return self.history.run_id

    @property
    def state(self) -> State:
        """State of the run; one that is only being gathered if there is none yet."""
        return self.history.state or State(0, GATHERING)

    @property
    def members(self) -> list[tuple[int, Member]]:
        """Lowest rank and node of the generation; empty if no generation runs."""
        current = self.history.round
        if current is None or self.state.phase != RUNNING:
            return []
        return list(zip(first_ranks(current.members), current.members, strict=True))

    @property
    def generation(self) -> GenerationHistory | None:
        """The last that began."""
        return self.history.generations[-1] if self.history.generations else None

    @property
    def faults(self) -> list[Fault]:
        """The last ones, the newest last."""
        return [fault for generation in self.history.generations for fault in generation.faults][-FAULTS_SHOWN:]

    def to_plain(self) -> dict[str, Any]:
        """Convert to what JSON can hold."""
        state = self.state
        plain = {
            "run": self.run_id,
            "phase": state.phase,
            "generation": state.generation,
            "reason": state.reason,
            "cause": state.cause,
            "min_nodes": state.min_nodes,
            "max_nodes": state.max_nodes,
            "nodes": len(self.history.present),
            "arbiter": self.history.arbiter,
            "meeting": self.history.boot,
            "members": [{"rank": rank, **asdict(member)} for rank, member in self.members],
            "waiting": [{**asdict(one.node), "why": one.why} for one in self.waiting],
            "denied": [asdict(one) for one in self.denied],
            "queue": None if self.queue is None else asdict(self.queue),
            "faults": [asdict(fault) for fault in self.faults],
        }
        return dict(to_json(plain))


async def read_facts(kv: Client, run_id: str) -> Facts:
    """Read everything that ``show`` shows.

    Arguments:
        kv: a client, whole, not a view.
        run_id: of the run.

    Raises:
        As ``read_history``.
    """
    history = await read_history(kv, run_id)
    shared = await _shared(kv)
    queue = await _queue(kv, run_id, find_cluster(run_id, shared))
    base = RunKeys(run_id).base
    prefixes = [f"{base}deny/", *([f"{CLUSTER_ROOT}{queue.cluster}/deny/"] if queue else [])]
    items = [*await kv.range(prefixes[0], prefix=True), *shared]
    denied = [await _denied(kv, item, prefix) for prefix in prefixes for item in items if _is_below(item, prefix)]
    return Facts(history, tuple(waiting(history, denied, queue)), tuple(denied), queue)


async def _shared(kv: Client) -> list[KeyValue]:
    """Return what is known of clusters; nothing, if this user may not read it: the run is shown without its queue."""
    try:
        return list(await kv.range(CLUSTER_ROOT, prefix=True))
    except PermissionDeniedError:
        return []


def _is_below(item: KeyValue, prefix: str) -> bool:
    return item.key.startswith(prefix.encode())


async def _denied(kv: Client, item: KeyValue, prefix: str) -> Denied:
    host = item.key.decode(errors="replace").removeprefix(prefix)
    left_s = (await kv.lease_info(item.lease)).ttl if item.lease else 0
    return Denied(host, read_denial(host, item.value).reason, max(left_s, 0))


def find_cluster(run_id: str, items: Iterable[KeyValue]) -> str:
    """Find the cluster whose ledger knows a run; empty: none does.

    Arguments:
        run_id: of the run.
        items: all ledgers.
    """
    for item in items:
        cluster, _, name = item.key.decode(errors="replace").removeprefix(CLUSTER_ROOT).rpartition("/")
        try:
            if name == "ledger" and Ledger.decode(item.value).find(run_id) is not None:
                return cluster
        except RecordError:
            continue
    return ""


async def _queue(kv: Client, run_id: str, cluster: str) -> Queue | None:
    if not cluster:
        return None
    view = await describe_cluster(kv, cluster)
    found = next((waiting for waiting in view.queue if waiting.run == run_id), None)
    return Queue(cluster) if found is None else Queue(cluster, True, found.reason)


def waiting(history: RunHistory, denied: Iterable[Denied], queue: Queue | None) -> list[Waiting]:
    """Explain why nodes wait, in the order in which they came.

    Arguments:
        history: of the run.
        denied: hosts that are left out.
        queue: the run's place in its cluster; None: it shares no machines.
    """
    state = history.state or State(0, GATHERING)
    current = history.round if state.phase == RUNNING else None
    members = {member.id for member in current.members} if current is not None else set()
    reasons = {one.host: one for one in denied}
    return [
        Waiting(node, _why(history, state, node, reasons.get(node.host), queue))
        for node in history.present
        if node.id not in members
    ]


def _why(history: RunHistory, state: State, node: Node, denied: Denied | None, queue: Queue | None) -> str:
    if state.phase == CLOSED:
        return "the run is closed"
    if (node.min_nodes, node.max_nodes) != (state.min_nodes, state.max_nodes):
        theirs, ours = f"{node.min_nodes}:{node.max_nodes}", f"{state.min_nodes}:{state.max_nodes}"
        return f"was started with {theirs} nodes, the run has {ours}"
    if denied is not None:
        return f"denied for {denied.seconds_left} s more: {denied.reason}"
    last = history.round
    if state.phase == BROKEN and last is not None:
        if node.want <= last.generation and any(member.id == node.id for member in last.members):
            return f"stopping its workers of generation {last.generation}"
    elif state.phase == RUNNING:
        full = last is not None and len(last.members) >= state.max_nodes
        return f"standby: all {state.max_nodes} places are taken" if full else "about to join"
    if len(history.present) < state.min_nodes:
        return f"waiting for the minimum: {len(history.present)} of {state.min_nodes} nodes are there"
    if queue is not None and queue.waits:
        return f"waiting for admission to cluster {queue.cluster}: {queue.reason}"
    return "waiting for the other members to come back" if state.phase == BROKEN else "waiting for more nodes to come"
