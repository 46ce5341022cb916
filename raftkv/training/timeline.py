"""The history of a run: its generations, nodes and faults, put together from the changes of its keys. Pure.

::

    history = await read_history(kv, "job")            # see ``history``
    for one in history.generations:
        print(one.generation, [member.host for member in one.members], one.reason, one.recovery)

No process writes a log for this: the store keeps every change of a key until it is compacted, so the timeline of a run
is what its keys went through. Owns the folding of these changes; ``history`` fetches them, ``raftkvctl run``
shows them.

Times are the wall clocks of those who wrote the records. A duration is exact only between two times of one writer,
which is nearly always so: the arbiter writes both the end of a generation and the beginning of the next. If it was the
arbiter that died, another clock wrote the second time, and the duration says that it is approximate.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from raftkv.client.records import RecordError
from raftkv.training.keys import RunKeys
from raftkv.training.records import BROKEN, CLOSED, Fault, GenerationRecord, Member, Node, State, to_json
from raftkv.training.rendezvous.world import first_ranks
from raftkv.training.scheduling.denylist import Reported, root_cause

Content = GenerationRecord | State | Fault | Node | str
"""What a key of a run holds; text: of ``arbiter``, ``boot/`` and ``deny/``."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change of one key.

    Attributes:
        revision: of the store.
        kind: the first part of the key's name: ``round``, ``state``, ``fault``, ``node``, ``arbiter``, ``boot`` or
            ``deny``.
        name: the rest of it, as a node id.
        content: what it holds now; None: it was deleted.
    """

    revision: int
    kind: str
    name: str
    content: Content | None


@dataclass(frozen=True, slots=True)
class Duration:
    """Seconds between two times; approximate if two clocks told them."""

    seconds: float
    approximate: bool = False

    @classmethod
    def between(cls, start: Stamp, end: Stamp) -> Duration:
        """Never negative: clocks that disagree so much only show that nothing is known.

        Arguments:
            start, end: as they were written.
        """
        seconds = end.time - start.time
        return cls(max(seconds, 0.0), approximate=start.writer != end.writer or seconds < 0)

    def __str__(self) -> str:
        return f"{'~' if self.approximate else ''}{self.seconds:.2f} s"


@dataclass(frozen=True, slots=True)
class Stamp:
    """When something was written: by the clock of which node, and at which revision of the store."""

    time: float
    writer: str
    revision: int


@dataclass(frozen=True, slots=True)
class CommitHistory:
    """A checkpoint of the run, as it was committed.

    Attributes:
        step, kind, size_bytes, holder: as in its record.
        saved: when its attempt began: the state of that moment is what it keeps.
        committed: when it was committed; by the next generation, perhaps.
    """

    step: int
    kind: str
    size_bytes: int
    holder: str
    saved: Stamp
    committed: Stamp


@dataclass(frozen=True, slots=True)
class Lost:
    """The work that the end of a generation cost, as far as it is known.

    No record holds each step, so the step at which a generation broke is not known. Known are the newest
    checkpoint that survived, and how much time lay between the state that it keeps and the end.

    Attributes:
        kept_step: of that checkpoint; None: there was none, and all work was lost.
        since: from its state, or from the beginning of the generation if that is later, to the end.
        steps_at_least: by so many steps an attempt was ahead of it that was given up.
        steps_estimated: by the pace between the commits of the generation; None: it had fewer than two.
    """

    kept_step: int | None
    since: Duration
    steps_at_least: int = 0
    steps_estimated: int | None = None

    def __str__(self) -> str:
        told = [f"{self.since} since {'the beginning' if self.kept_step is None else f'step {self.kept_step}'}"]
        told += [f"up to ~{self.steps_estimated} steps"] if self.steps_estimated is not None else []
        told += [f"at least {self.steps_at_least}"] if self.steps_at_least else []
        return ", ".join(told)


@dataclass(frozen=True, slots=True)
class GenerationHistory:
    """One generation.

    Attributes:
        generation: its number.
        members: in the order of ranks.
        began: when.
        ended: when it broke, was closed or was followed by another; None: it goes on.
        reason: why it ended, for people; cause and node: as the arbiter wrote them.
        faults: what was reported in it, the oldest first.
        closed: it ended because the run was closed.
        recovery: from its end to the beginning of the next generation; None: there is none (yet), or the run was
            closed.
        commits: checkpoints whose saving began in it and that were committed; see ``history``.
        lost: what its end cost; None: it goes on, or was closed, or nothing is known of checkpoints.
    """

    generation: int
    members: tuple[Member, ...]
    began: Stamp
    ended: Stamp | None = None
    reason: str = ""
    cause: str = ""
    node: str = ""
    closed: bool = False
    faults: tuple[Fault, ...] = ()
    recovery: Duration | None = None
    commits: tuple[CommitHistory, ...] = ()
    lost: Lost | None = None

    @property
    def lasted(self) -> Duration | None:
        """From its beginning to its end."""
        return None if self.ended is None else Duration.between(self.began, self.ended)

    @property
    def root_fault(self) -> Fault | None:
        """The fault that ended it: of all that were reported, in their order, the one the others follow from."""
        named = [fault for fault in self.faults if fault.node == self.node and self.cause in ("", fault.cause)]
        found = root_cause(Reported(fault, place) for place, fault in enumerate(self.faults))
        return found or next(iter([*named, *self.faults]), None)

    def rank_of(self, node_id: str) -> int | None:
        """Return the lowest rank of a node; None: the node was not in the generation."""
        for rank, member in zip(first_ranks(self.members), self.members, strict=True):
            if member.id == node_id:
                return rank
        return None


@dataclass(frozen=True, slots=True)
class NodeHistory:
    """One node, from its first registration to its end.

    Attributes:
        id, host, address, slots: as in its record.
        joined: by its own clock.
        left_revision: of the store, when its key went; 0: it is there.
        cause: why it went, as far as that is known.
    """

    id: str
    host: str
    address: str
    slots: int
    joined: Stamp
    left_revision: int = 0
    cause: str = ""


@dataclass(frozen=True, slots=True)
class RunHistory:
    """A run.

    Attributes:
        run_id: of it.
        revision: of the store, up to which this is true.
        since_revision: from which on this is true.
        complete: whether that is the run's beginning; False: what was before is compacted.
        generations, nodes: the oldest first.
        state, round: as they are now; None: not written yet.
        present: the nodes that are there now.
        arbiter: id of the node that decides; empty: none.
        boot: what rank 0 of the last generation has published.
        denied: hosts that may not take part for now.
    """

    run_id: str
    revision: int
    since_revision: int
    complete: bool
    generations: tuple[GenerationHistory, ...] = ()
    nodes: tuple[NodeHistory, ...] = ()
    state: State | None = None
    round: GenerationRecord | None = None
    present: tuple[Node, ...] = ()
    arbiter: str = ""
    boot: str = ""
    denied: tuple[str, ...] = ()

    def to_plain(self) -> dict[str, Any]:
        """Convert to what JSON can hold: numbers, texts, lists and tables."""
        plain = asdict(self)
        for shown, generation in zip(plain["generations"], self.generations, strict=True):
            root = generation.root_fault
            shown["root_fault"] = None if root is None else asdict(root)
            shown["lasted"] = None if generation.lasted is None else asdict(generation.lasted)
        return dict(to_json(plain))


@dataclass
class Fold:
    """A run, change by change.

    ``apply`` takes changes in the order of revisions; ``history`` is where that has led to.
    """

    keys: RunKeys
    state: State | None = None
    round: GenerationRecord | None = None
    arbiter: str = ""
    generations: list[GenerationHistory] = field(default_factory=list)
    nodes: dict[str, NodeHistory] = field(default_factory=dict)
    present: dict[str, Node] = field(default_factory=dict)
    boots: dict[str, str] = field(default_factory=dict)
    denied: dict[str, str] = field(default_factory=dict)
    revision: int = 0

    def apply(self, change: Change) -> None:
        """Take one change."""
        self.revision = max(self.revision, change.revision)
        content = change.content
        if change.kind == "arbiter":
            self.arbiter = content if isinstance(content, str) else ""
        elif change.kind == "node":
            self._apply_node(change)
        elif isinstance(content, GenerationRecord):
            self._begin(content, change.revision)
        elif isinstance(content, State):
            self._set_state(content, change.revision)
        elif isinstance(content, Fault):
            self._add_fault(content)
        elif change.kind in ("state", "round") and content is None:
            self.state = self.round = None  # the run was deleted: what comes now is another one of that id
            self.generations.clear()
        elif change.kind in ("boot", "deny"):
            self._set_text(self.boots if change.kind == "boot" else self.denied, change)

    def _set_text(self, texts: dict[str, str], change: Change) -> None:
        if isinstance(change.content, str):
            texts[change.name] = change.content
        else:
            texts.pop(change.name, None)

    def _apply_node(self, change: Change) -> None:
        if isinstance(change.content, Node):
            node = self.present[change.name] = change.content
            joined = Stamp(node.time, node.id, change.revision)
            first = NodeHistory(node.id, node.host, node.address, node.slots, joined)
            # One that registers anew, after its lease was lost, is the same node.
            self.nodes[change.name] = replace(self.nodes.get(change.name, first), left_revision=0, cause="")
        elif change.content is None and self.present.pop(change.name, None) is not None:
            cause = self.state.cause if self.state is not None and self.state.node == change.name else ""
            self.nodes[change.name] = replace(self.nodes[change.name], left_revision=change.revision, cause=cause)

    def _begin(self, content: GenerationRecord, revision: int) -> None:
        if not content.members and self.round is not None and self.round.generation == content.generation:
            return  # the run has ended, and its record names no member any more
        began = Stamp(content.time, self.arbiter, revision)
        if self.generations:
            last = self.generations[-1]
            ended = last.ended or began
            recovery = None if last.closed else Duration.between(ended, began)
            self.generations[-1] = replace(last, ended=ended, recovery=recovery)
        # A lasting member is one object in all generations: else a thousand nodes and generations make a million.
        known = {member: member for member in (self.round.members if self.round is not None else ())}
        members = tuple(known.get(member, member) for member in content.members)
        self.round = replace(content, members=members)
        self.generations.append(GenerationHistory(content.generation, members, began))

    def _set_state(self, content: State, revision: int) -> None:
        self.state = content
        gone = self.nodes.get(content.node)
        if gone is not None and gone.left_revision and not gone.cause:
            self.nodes[content.node] = replace(gone, cause=content.cause)
        if not self.generations or content.phase not in (BROKEN, CLOSED):
            return
        self._end(content, revision)

    def _end(self, content: State, revision: int) -> None:
        last, closed = self.generations[-1], content.phase == CLOSED
        if content.generation != last.generation or (last.ended is not None and not closed):
            return
        if last.ended is not None:
            self.generations[-1] = replace(last, closed=True)
            return
        # Any node may close a run, and the state names it. All else is written by the arbiter.
        ended = Stamp(content.time, content.node if closed else self.arbiter, revision)
        self.generations[-1] = replace(
            last, ended=ended, reason=content.reason, cause=content.cause, node=content.node, closed=closed
        )

    def _add_fault(self, fault: Fault) -> None:
        for index, generation in enumerate(self.generations):
            if generation.generation == fault.generation and fault not in generation.faults:
                self.generations[index] = replace(generation, faults=(*generation.faults, fault))

    def history(self, *, since_revision: int, complete: bool) -> RunHistory:
        """Return the run that the changes so far have led to.

        Arguments:
            since_revision: from which on the changes are known.
            complete: whether that is the run's beginning.
        """
        generation = self.round.generation if self.round is not None else 0
        return RunHistory(
            self.keys.run_id,
            self.revision,
            since_revision,
            complete,
            tuple(self.generations),
            tuple(sorted(self.nodes.values(), key=lambda node: node.joined.revision)),
            self.state,
            self.round,
            tuple(self.present.values()),
            self.arbiter,
            self.boots.get(str(generation), ""),
            tuple(sorted(self.denied)),
        )


def fold(keys: RunKeys, changes: Iterable[Change]) -> Fold:
    """Fold all changes.

    Arguments:
        keys: of the run.
        changes: in the order of revisions.
    """
    folded = Fold(keys)
    for change in changes:
        folded.apply(change)
    return folded


def read_change(keys: RunKeys, key: bytes, value: bytes | None, revision: int) -> Change | None:
    """Decode a change of a key; None: history is not made of that key, or it holds something else.

    Arguments:
        keys: of the run.
        key: which changed.
        value: what it holds now; None: it was deleted.
        revision: of the change.
    """
    kind, _, name = key.decode("utf-8", "backslashreplace").removeprefix(keys.base).partition("/")
    records: dict[str, type[GenerationRecord | State | Fault | Node]] = {
        "round": GenerationRecord,
        "state": State,
        "fault": Fault,
        "node": Node,
    }
    if kind not in records and kind not in ("arbiter", "boot", "deny"):
        return None
    if value is None:
        return Change(revision, kind, name, None)
    try:
        record = records.get(kind)
        content: Content = value.decode() if record is None else record.decode(value)
    except (RecordError, UnicodeDecodeError):
        return None  # a foreign value; the run goes on without it, and so does its history
    return Change(revision, kind, name, content)
