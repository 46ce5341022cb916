"""Display of runs: tables and colour on a terminal, the same cells as plain columns elsewhere.

Contains the texts for people; ``cli.table`` prints the tables.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from raftkv.cli.table import Rows, clock, count, out
from raftkv.client.records import RecordError
from raftkv.errors import PermissionDeniedError, printable
from raftkv.training.history import Change, Fold, GenerationHistory, RunHistory, RunSummary, read_history
from raftkv.training.records import (
    BROKEN,
    CLOSED,
    CLUSTER_ROOT,
    GATHERING,
    RUNNING,
    Fault,
    Member,
    Node,
    RunKeys,
    State,
    to_json,
)
from raftkv.training.rendezvous.world import first_ranks, world_size
from raftkv.training.scheduling.admission import Ledger
from raftkv.training.scheduling.denylist import read_denial
from raftkv.training.scheduling.ledger import ClusterView, describe_cluster
from raftkv.urls import join_address

if TYPE_CHECKING:
    from raftkv.client.library import Client
    from raftkv.client.values import KeyValue

# -- facts ----------------------------------------------------------------------------------------------------------
#
# The current state of a run, and why its waiting nodes wait; for ``raftkvctl run show``.
#
# Every present node outside a running generation gets one line with the reason.

FAULTS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Waiting:
    """A present node outside a running generation, and the reason."""

    node: Node
    why: str


@dataclass(frozen=True, slots=True)
class Denied:
    """A host that is excluded, and the remaining seconds."""

    host: str
    reason: str
    seconds_left: int


@dataclass(frozen=True, slots=True)
class Queue:
    """The place of a run in a cluster whose slots it shares with other runs.

    Attributes:
        cluster: name of the cluster.
        waits: whether the run has no slots yet.
        reason: why it has none, in one line; empty if it has slots.
    """

    cluster: str
    waits: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """The current state of a run."""

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
        """State of the run; a state of gathering if none is stored yet."""
        return self.history.state or State(0, GATHERING)

    @property
    def members(self) -> list[tuple[int, Member]]:
        """The nodes of the generation with their lowest ranks; empty if no generation runs."""
        current = self.history.round
        if current is None or self.state.phase != RUNNING:
            return []
        return list(zip(first_ranks(current.members), current.members, strict=True))

    @property
    def generation(self) -> GenerationHistory | None:
        """The last generation."""
        return self.history.generations[-1] if self.history.generations else None

    @property
    def faults(self) -> list[Fault]:
        """The last faults, newest last."""
        return [fault for generation in self.history.generations for fault in generation.faults][-FAULTS_SHOWN:]

    def to_plain(self) -> dict[str, Any]:
        """Convert to JSON types."""
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
    """Read everything that ``show`` prints.

    Arguments:
        kv: client of all keys, not a view.
        run_id: id of the run.

    Raises:
        As ``read_history``.
    """
    history = await read_history(kv, run_id)
    shared = await read_ledgers(kv)
    queue = await _queue(kv, run_id, find_cluster(run_id, shared))
    base = RunKeys(run_id).base
    prefixes = [f"{base}deny/", *([f"{CLUSTER_ROOT}{queue.cluster}/deny/"] if queue else [])]
    items = [*await kv.range(prefixes[0], prefix=True), *shared]
    denied = [await _denied(kv, item, prefix) for prefix in prefixes for item in items if _is_below(item, prefix)]
    return Facts(history, tuple(waiting(history, denied, queue)), tuple(denied), queue)


async def read_ledgers(kv: Client) -> list[KeyValue]:
    """Return the ledgers of clusters; empty without permission: a run is then shown without its queue."""
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
    """Return the cluster whose ledger lists a run; empty: none.

    Arguments:
        run_id: id of the run.
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
    """Return the reasons why nodes wait, in order of arrival.

    Arguments:
        history: history of the run.
        denied: excluded hosts.
        queue: place of the run in its cluster; None: it does not share machines.
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
        return f"waiting for the minimum: {len(history.present)} of {state.min_nodes} nodes are present"
    if queue is not None and queue.waits:
        return f"waiting for admission to cluster {queue.cluster}: {queue.reason}"
    return "waiting for the other members to come back" if state.phase == BROKEN else "waiting for more nodes to come"


MEMBERS_SHOWN: Final = 8
_STYLES: Final = {RUNNING: "bold green", GATHERING: "yellow", BROKEN: "bold red", CLOSED: "dim", "fault": "red"}


def ranks_text(first: int, slots: int) -> str:
    """Format as ``3`` or ``4-7``.

    Arguments:
        first: lowest rank.
        slots: number of ranks.
    """
    return str(first) if slots == 1 else f"{first}-{first + slots - 1}"


def members_text(members: Sequence[Member]) -> str:
    """Format as ``a (rank 0), b (ranks 1-2)``; of many members, only the first ones."""
    shown = [
        f"{member.host} (rank{'s' if member.slots > 1 else ''} {ranks_text(first, member.slots)})"
        for first, member in zip(first_ranks(members), members, strict=True)
    ]
    more = len(shown) - MEMBERS_SHOWN
    return ", ".join(shown[:MEMBERS_SHOWN]) + (f" and {more} more" if more > 0 else "")


# ---- list


def summary_to_plain(summary: RunSummary) -> dict[str, Any]:
    """Convert to JSON types."""
    state = summary.state or State(0, GATHERING)
    return {
        "run": summary.run_id,
        "phase": state.phase,
        "epoch": state.generation,
        "nodes": summary.nodes,
        "min_nodes": state.min_nodes,
        "max_nodes": state.max_nodes,
        "reason": state.reason,
        "time": state.time,
    }


def runs_table(runs: Sequence[RunSummary]) -> Rows:
    """Return the table of all runs."""
    rows, styles = [], []
    for summary in runs:
        one = summary_to_plain(summary)
        limits = f"{one['min_nodes']}:{one['max_nodes']}"
        dead = one["phase"] != CLOSED and not one["nodes"]
        phase = f"{one['phase']}, no nodes" if dead else one["phase"]
        rows.append(
            (one["run"], phase, str(one["epoch"]), str(one["nodes"]), limits, clock(one["time"]), one["reason"])
        )
        styles.append(_STYLES[BROKEN] if dead else _STYLES[one["phase"]])
    return Rows(("run", "phase", "generation", "nodes", "limits", "since", "reason"), rows, styles)


# ---- show


def show(facts: Facts) -> None:
    """Print the current state of one run."""
    emit(Line(facts.state.phase, headline(facts)))
    for line in details(facts):
        print(printable(line))
    if facts.members:
        print()
        out(_members_table(facts))
    if facts.waiting:
        print()
        rows = [(one.node.id, one.node.host, str(one.node.slots), one.why) for one in facts.waiting]
        out(Rows(("waiting", "host", "slots", "why"), rows))
    if facts.faults:
        print()
        faults = facts.faults
        told = [(str(fault.generation), clock(fault.time), str(fault)) for fault in faults]
        out(Rows(("generation", "at", "last faults"), told, [_STYLES["fault"]] * len(told)))


def headline(facts: Facts) -> str:
    """Return the state of the run in one line."""
    state, current = facts.state, facts.history.round
    text = f"run {facts.run_id}: {state.phase}"
    if state.phase == RUNNING and current is not None:
        size = world_size(current.members)
        text += f", generation {state.generation}: {count(len(current.members), 'node')}, {count(size, 'rank')}"
    elif state.generation:
        text += f" after generation {state.generation}"
    present = len(facts.history.present)
    if not present:
        return text if state.phase == CLOSED else f"{text}; no node is left"
    least = "" if state.min_nodes == state.max_nodes else f"{state.min_nodes} to "
    return f"{text}; {count(present, 'node')} present, {least}{state.max_nodes} wanted"


def details(facts: Facts) -> list[str]:
    """Return further facts, one per line."""
    state, generation = facts.state, facts.generation
    lines = []
    if state.time:
        lines.append(f"since {clock(state.time)}{f': {state.reason}' if state.reason else ''}")
    if state.phase == RUNNING and generation is not None and len(facts.history.generations) > 1:
        before = facts.history.generations[-2]
        if before.recovery is not None:
            lines.append(f"re-formed in {before.recovery} after: {end_text(before)}")
    if facts.history.boot and state.phase == RUNNING:
        lines.append(f"store of the workers: {_address(facts.history.boot)}")
    if facts.history.arbiter:
        lines.append(f"arbiter {facts.history.arbiter}")
    if facts.queue is not None:
        lines.append(f"cluster {facts.queue.cluster}: {facts.queue.reason if facts.queue.waits else 'admitted'}")
    lines += [f"denied for {one.seconds_left} s more: {one.host}: {one.reason}" for one in facts.denied]
    return lines


def _address(published: str) -> str:
    """Return the address of rank 0 as HOST:PORT; torch's agents publish it as HOST PORT."""
    host, separator, port = published.rpartition(" ")
    return join_address(host, port) if separator and port.isdecimal() else published


def _members_table(facts: Facts) -> Rows:
    rows = [
        (ranks_text(first, member.slots), member.id, member.host, member.address, str(member.slots), member.topology)
        for first, member in facts.members
    ]
    return Rows(("rank", "node", "host", "address", "slots", "place"), rows)


# ---- queue


def queues(views: Sequence[ClusterView]) -> None:
    """Print several clusters, each like ``queue``."""
    if not views:
        print("No cluster shares its slots among runs. A run joins one with the setting cluster=NAME.")
    for number, view in enumerate(views):
        print("\n" if number else "", end="")
        queue(view)


def queue(view: ClusterView) -> None:
    """Print a cluster: its hosts, the runs that hold slots, and the runs that wait."""
    holders = count(len(view.grants), "run")
    print(f"cluster {view.cluster}: {count(len(view.hosts), 'host')}, {holders} admitted, {len(view.queue)} waiting")
    if view.hosts:
        print()
        out(_hosts_table(view))
    if view.queue:
        print()
        waits = [
            (str(one.place or "-"), one.run, f"{one.min_nodes}:{one.max_nodes}", str(one.nodes), one.reason)
            for one in view.queue
        ]
        out(Rows(("place", "waiting", "limits", "nodes", "why"), waits))


def _hosts_table(view: ClusterView) -> Rows:
    rows, styles = [], []
    for host in view.hosts:
        held = ", ".join(f"{run} {slots}" for run, slots in sorted(host.held.items()))
        rows.append((host.host, str(host.slots), str(host.free), held, str(host.strikes or ""), host.denied))
        styles.append(_STYLES["fault"] if host.denied else "")
    return Rows(("host", "slots", "free", "held by", "strikes", "denied"), rows, styles)


# ---- timeline


def end_text(generation: GenerationHistory) -> str:
    """Return why a generation ended: its root cause if known."""
    root = generation.root_fault
    if generation.closed:
        return f"closed: {generation.reason}" if generation.reason else "closed"
    return str(root) if root is not None else generation.reason or generation.cause


def timeline(history: RunHistory) -> None:
    """Print the events of a run."""
    faults = sum(len(generation.faults) for generation in history.generations)
    counts = [count(len(history.generations), "generation"), count(len(history.nodes), "node"), count(faults, "fault")]
    commits = sum(len(generation.commits) for generation in history.generations)
    counts += [count(commits, "commit")] if commits else []
    print(f"run {history.run_id}: {', '.join(counts)}")
    if not history.complete:
        print(f"the history before revision {history.since_revision} was compacted")
    if history.generations:
        print()
        out(_generations_table(history))
    if history.nodes:
        print()
        out(_nodes_table(history))


def _generations_table(history: RunHistory) -> Rows:
    rows, styles = [], []
    has_progress = any(generation.commits or generation.lost for generation in history.generations)
    for generation in history.generations:
        lasted = str(generation.lasted) if generation.lasted is not None else "runs"
        recovery = str(generation.recovery) if generation.recovery is not None else ""
        began, members = clock(generation.began.time), members_text(generation.members)
        progress = (commits_text(generation), str(generation.lost or "")) if has_progress else ()
        rows.append((str(generation.generation), began, lasted, members, *progress, end_text(generation), recovery))
        styles.append(_STYLES["fault"] if generation.faults else "")
    header = ("generation", "began", "lasted", "members", *(("commits", "lost") if has_progress else ()))
    return Rows((*header, "ended because", "re-formed in"), rows, styles)


def commits_text(generation: GenerationHistory) -> str:
    """Format as ``3: steps 100 to 300``; empty if the generation has committed nothing."""
    steps = sorted({commit.step for commit in generation.commits})
    if len(steps) < 2:
        return f"1: step {steps[0]}" if steps else ""
    return f"{len(generation.commits)}: steps {steps[0]} to {steps[-1]}"


def _nodes_table(history: RunHistory) -> Rows:
    rows, styles = [], []
    for node in history.nodes:
        gone = node.left_revision != 0
        end = f"gone{f': {node.cause}' if node.cause else ''}" if gone else "is there"
        rows.append((node.id, node.host, node.address, str(node.slots), clock(node.joined.time), end))
        styles.append("dim" if gone else "green")
    return Rows(("node", "host", "address", "slots", "joined", "now"), rows, styles)


# ---- watch


@dataclass(frozen=True, slots=True)
class Line:
    """One event.

    Attributes:
        kind: a phase, ``node``, ``fault`` or ``arbiter``.
        text: text for people.
        revision: revision of the store.
        time: time on the writer's clock; 0: unknown.
    """

    kind: str
    text: str
    revision: int = 0
    time: float = 0.0


def emit(line: Line) -> None:
    """Print a line without delay: with its time, and with colour on a terminal."""
    text = printable(f"{clock(line.time)}  {line.text}" if line.time else line.text)
    style = _STYLES.get(line.kind, "")
    if not style or not sys.stdout.isatty():
        print(text, flush=True)
        return
    from rich.console import Console
    from rich.text import Text

    Console().print(Text(text, style), soft_wrap=True)


class Narrator:
    """Turns changes into lines; remembers what was printed, so that rewriting a record prints nothing."""

    def __init__(self) -> None:
        self._state: State | None = None

    def lines(self, change: Change | None, fold: Fold) -> list[Line]:
        """Return the lines for a change; without a change, the lines for the current state.

        Arguments:
            change: change, already applied to ``fold``.
            fold: state of the run.
        """
        if change is None:
            return self._present(fold)
        content = change.content
        if isinstance(content, State):
            return self._state_lines(content, fold, change.revision)
        if isinstance(content, Fault):
            return [
                Line("fault", f"fault in generation {content.generation}: {content}", change.revision, content.time)
            ]
        if change.kind == "node":
            return self._node_lines(change, fold)
        if change.kind == "state":
            self._state = None
            return [Line(CLOSED, "the run was deleted", change.revision, time.time())]
        if change.kind == "arbiter" and isinstance(content, str):
            return [Line("arbiter", f"arbiter is {content}", change.revision, time.time())]
        return []

    def _present(self, fold: Fold) -> list[Line]:
        lines = [_came(node, 0) for node in fold.present.values()]
        return lines + (self._state_lines(fold.state, fold, 0) if fold.state is not None else [])

    def _node_lines(self, change: Change, fold: Fold) -> list[Line]:
        if change.content is None:
            return [Line("node", f"node {change.name} is gone", change.revision, time.time())]
        node = fold.present[change.name]
        is_new = fold.nodes[change.name].joined.revision == change.revision
        return [_came(node, change.revision)] if is_new else []

    def _state_lines(self, state: State, fold: Fold, revision: int) -> list[Line]:
        before, self._state = self._state, state
        changed = before is None or (before.phase, before.generation, before.reason) != (
            state.phase, state.generation, state.reason,
        )  # fmt: skip
        lines = [Line(state.phase, _state_text(state, fold), revision, state.time)] if changed else []
        if state.phase in (GATHERING, BROKEN) and (before is None or before.joined != state.joined or changed):
            told = f"gathering: {state.joined} of at least {count(state.min_nodes, 'node')} ready"
            lines.append(Line(GATHERING, told, revision, time.time()))
        return lines


def _came(node: Node, revision: int) -> Line:
    where = f"{node.address}, {count(node.slots, 'slot')}" if node.address else count(node.slots, "slot")
    return Line("node", f"node {node.id} {'came' if revision else 'is there'} ({where})", revision, node.time)


def _state_text(state: State, fold: Fold) -> str:
    if state.phase == RUNNING and fold.round is not None:
        text = f"generation {state.generation} runs: {members_text(fold.round.members)}"
        before = fold.generations[-2] if len(fold.generations) > 1 else None
        return f"{text}; re-formed in {before.recovery}" if before is not None and before.recovery else text
    because = f": {state.reason}" if state.reason else ""
    if state.phase == BROKEN:
        return f"generation {state.generation} is over{because}"
    return f"{'closed' if state.phase == CLOSED else 'gathering nodes'}{because}"
