"""How runs look: tables and colour on a terminal, the same cells as plain columns elsewhere.

Owns the words for people; ``output.table`` prints the tables.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from raftkv.cli.output.table import Rows, clock, count, out, printable
from raftkv.cli.runs.facts import Facts
from raftkv.training.history import RunSummary
from raftkv.training.records import BROKEN, CLOSED, GATHERING, RUNNING, Fault, Member, Node, State
from raftkv.training.rendezvous.world import first_ranks, world_size
from raftkv.training.scheduling.ledger import ClusterView
from raftkv.training.timeline import Change, Fold, GenerationHistory, RunHistory

MEMBERS_SHOWN: Final = 8
_STYLES: Final = {RUNNING: "bold green", GATHERING: "yellow", BROKEN: "bold red", CLOSED: "dim", "fault": "red"}


def ranks_text(first: int, slots: int) -> str:
    """Format as ``3`` or ``4-7``.

    Arguments:
        first: the lowest rank.
        slots: how many ranks.
    """
    return str(first) if slots == 1 else f"{first}-{first + slots - 1}"


def members_text(members: Sequence[Member]) -> str:
    """Format as ``a (rank 0), b (ranks 1-2)``; of many only the first."""
    shown = [
        f"{member.host} (rank{'s' if member.slots > 1 else ''} {ranks_text(first, member.slots)})"
        for first, member in zip(first_ranks(members), members, strict=True)
    ]
    more = len(shown) - MEMBERS_SHOWN
    return ", ".join(shown[:MEMBERS_SHOWN]) + (f" and {more} more" if more > 0 else "")


# ---- list


def summary_to_plain(summary: RunSummary) -> dict[str, Any]:
    """Convert to what JSON can hold."""
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
    """Lay out all runs."""
    rows, styles = [], []
    for summary in runs:
        one = summary_to_plain(summary)
        limits = f"{one['min_nodes']}:{one['max_nodes']}"
        dead = one["phase"] != CLOSED and not one["nodes"]
        phase = f"{one['phase']} (dead)" if dead else one["phase"]
        rows.append(
            (one["run"], phase, str(one["epoch"]), str(one["nodes"]), limits, clock(one["time"]), one["reason"])
        )
        styles.append(_STYLES[BROKEN] if dead else _STYLES[one["phase"]])
    return Rows(("run", "phase", "generation", "nodes", "limits", "since", "reason"), rows, styles)


# ---- show


def show(facts: Facts) -> None:
    """Print one run as it is."""
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
    """Describe the run in one line."""
    state, current = facts.state, facts.history.round
    text = f"run {facts.run_id}: {state.phase}"
    if state.phase == RUNNING and current is not None:
        size = world_size(current.members)
        text += f", generation {state.generation}: {count(len(current.members), 'node')}, {count(size, 'rank')}"
    elif state.generation:
        text += f" after generation {state.generation}"
    present = len(facts.history.present)
    if state.phase != CLOSED and not present:
        return f"{text}; no node is there any more"
    return f"{text}; {count(present, 'node')} there, limits {state.min_nodes}:{state.max_nodes}"


def details(facts: Facts) -> list[str]:
    """Describe what else there is to say, a line each."""
    state, generation = facts.state, facts.generation
    lines = []
    if state.time:
        lines.append(f"since {clock(state.time)}{f': {state.reason}' if state.reason else ''}")
    if state.phase == RUNNING and generation is not None and len(facts.history.generations) > 1:
        before = facts.history.generations[-2]
        if before.recovery is not None:
            lines.append(f"re-formed in {before.recovery} from: {end_text(before)}")
    if facts.history.boot and state.phase == RUNNING:
        lines.append(f"the workers meet at {_address(facts.history.boot)}")
    if facts.history.arbiter:
        lines.append(f"arbiter {facts.history.arbiter}")
    if facts.queue is not None:
        lines.append(f"cluster {facts.queue.cluster}: {facts.queue.reason if facts.queue.waits else 'admitted'}")
    lines += [f"denied for {one.seconds_left} s more: {one.host}: {one.reason}" for one in facts.denied]
    return lines


def _address(published: str) -> str:
    """Return where rank 0 waits for the others, as HOST:PORT; torch's agents publish it as HOST PORT."""
    host, separator, port = published.rpartition(" ")
    if not separator or not port.isdecimal():
        return published
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _members_table(facts: Facts) -> Rows:
    rows = [
        (ranks_text(first, member.slots), member.id, member.host, member.address, str(member.slots), member.topology)
        for first, member in facts.members
    ]
    return Rows(("rank", "node", "host", "address", "slots", "place"), rows)


# ---- queue


def queue(view: ClusterView) -> None:
    """Print a cluster: its hosts, who holds their slots, who waits."""
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
    """Explain why a generation ended: its root cause if that is known."""
    root = generation.root_fault
    if generation.closed:
        return f"closed: {generation.reason}" if generation.reason else "closed"
    return str(root) if root is not None else generation.reason or generation.cause


def timeline(history: RunHistory) -> None:
    """Print what happened in a run."""
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
    """Format as ``3: steps 100 to 300``; empty: it has committed nothing."""
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
    """One thing that happened.

    Attributes:
        kind: a phase, ``node``, ``fault`` or ``arbiter``.
        text: for people.
        revision: of the store.
        time: of the writer's clock; 0: not told.
    """

    kind: str
    text: str
    revision: int = 0
    time: float = 0.0

    def to_plain(self) -> dict[str, Any]:
        """Convert to what JSON can hold."""
        return {"kind": self.kind, "text": self.text, "revision": self.revision, "time": self.time}


def emit(line: Line) -> None:
    """Print a line at once: with its time, and colour on a terminal."""
    text = printable(f"{clock(line.time)}  {line.text}" if line.time else line.text)
    style = _STYLES.get(line.kind, "")
    if not style or not sys.stdout.isatty():
        print(text, flush=True)
        return
    from rich.console import Console
    from rich.text import Text

    Console().print(Text(text, style), soft_wrap=True)


class Narrator:
    """Turns changes into lines; remembers what it has told, so that a record that is written again says nothing."""

    def __init__(self) -> None:
        self._state: State | None = None

    def lines(self, change: Change | None, fold: Fold) -> list[Line]:
        """Return what a change is worth saying; of no change: the run as it is.

        Arguments:
            change: already applied to ``fold``.
            fold: the run.
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
