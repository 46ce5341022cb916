"""The history of a run, read from the store: every change of its keys, from the first on.

::

    runs = await list_runs(kv)
    history = await read_history(kv, "job")
    async for change, fold in follow(kv, "job"): ...

The changes come from a watch that begins in the past: at the revision at which the run's record was created. If that
revision is compacted, the history begins with a copy of the keys at the compaction (``complete`` is False). A watch has
no end, so the reader first copies the current keys, and stops when the changes have led to that copy.

Nothing is written. Keys of user code and of torch stores (``store/``, ``sync/``) are not read.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from raftkv.checkpoint.keys import MEMORY, AttemptId, RegistryKeys
from raftkv.checkpoint.records import Checkpoint
from raftkv.client.control import ClientControl, Interval, Reflector, Sparse, below
from raftkv.client.records import RecordError, read
from raftkv.client.scope import prefix_end
from raftkv.client.values import PUT, Event, KeyValue
from raftkv.errors import CompactedError
from raftkv.training.errors import UnknownRun
from raftkv.training.records import (
    BROKEN,
    CLOSED,
    ROOT,
    RUN_ID_MAX,
    Fault,
    GenerationRecord,
    Member,
    Node,
    RunKeys,
    State,
    check_run_id,
    reads_of_nodes,
    to_json,
)
from raftkv.training.rendezvous.world import first_ranks
from raftkv.training.scheduling.denylist import Reported, root_cause

if TYPE_CHECKING:
    from raftkv.client.library import Client
    from raftkv.client.watch import Watch

# -- timeline -------------------------------------------------------------------------------------------------------
#
# The history of a run: its generations, nodes and faults, computed from the changes of its keys. Pure.
#
# ::
#
#     history = await read_history(kv, "job")            # see ``history``
#     for one in history.generations:
#         print(one.generation, [member.host for member in one.members], one.reason, one.recovery)
#
# No process writes a log for this: the store keeps every change of a key until it is compacted, so the timeline of a
# run is the history of its keys. This part folds the changes; ``read_history`` fetches them, ``raftkvctl run`` prints
# them.
#
# Times are the wall clocks of the nodes that wrote the records. A duration is exact only between two times of one
# writer, which is the usual case: the arbiter writes both the end of a generation and the beginning of the next. If the
# arbiter died, another node wrote the second time, and the duration is marked approximate.

Content = GenerationRecord | State | Fault | Node | str
"""Content of a key of a run; a string for ``arbiter``, ``boot/`` and ``deny/``."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change of one key.

    Attributes:
        revision: store revision.
        kind: the first part of the key's name: ``round``, ``state``, ``fault``, ``node``, ``arbiter``, ``boot`` or
            ``deny``.
        name: the rest of the key, such as a node id.
        content: current content; None: deleted.
    """

    revision: int
    kind: str
    name: str
    content: Content | None


@dataclass(frozen=True, slots=True)
class Duration:
    """Seconds between two times; approximate if the times are from two clocks."""

    seconds: float
    approximate: bool = False

    @classmethod
    def between(cls, start: Stamp, end: Stamp) -> Duration:
        """Return the time between two stamps, at least 0 even if the clocks disagree.

        Arguments:
            start, end: times as they were written.
        """
        seconds = end.time - start.time
        return cls(max(seconds, 0.0), approximate=start.writer != end.writer or seconds < 0)

    def __str__(self) -> str:
        return f"{'~' if self.approximate else ''}{self.seconds:.2f} s"


@dataclass(frozen=True, slots=True)
class Stamp:
    """When something was written: the time, the node whose clock gave it, and the store revision."""

    time: float
    writer: str
    revision: int


@dataclass(frozen=True, slots=True)
class CommitHistory:
    """A checkpoint of the run, as it was committed.

    Attributes:
        step, kind, size_bytes, holder: fields of its record.
        saved: when its attempt began, which is the time of the saved state.
        committed: when it was committed, possibly by the next generation.
    """

    step: int
    kind: str
    size_bytes: int
    holder: str
    saved: Stamp
    committed: Stamp


@dataclass(frozen=True, slots=True)
class Lost:
    """The work that was lost at the end of a generation, as far as it is known.

    The store does not record single steps, so the step at which a generation ended is unknown. Known are the newest
    checkpoint that survived, and the time between the state in it and the end.

    Attributes:
        kept_step: step of the last checkpoint; None: there was none, and all work was lost.
        since: time from its state, or from the beginning of the generation if that is later, to the end.
        steps_at_least: how many steps an aborted attempt was ahead of the kept state.
        steps_estimated: lost steps, by the pace between the commits of the generation; None: it had fewer than two.
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
        generation: generation number.
        members: members in rank order.
        began: when.
        ended: when a fault ended it, it was closed or another followed; None: it is running.
        reason: why it ended, for people; ``cause`` and ``node`` are as the arbiter wrote them.
        faults: faults reported in it, oldest first.
        closed: whether it ended because the run was closed.
        recovery: time from its end to the beginning of the next generation; None: no next generation (yet), or the run
            was closed.
        commits: committed checkpoints whose save began in this generation.
        lost: work that its end lost; None: it is running or was closed, or checkpoints are unknown.
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
        """Time from its beginning to its end."""
        return None if self.ended is None else Duration.between(self.began, self.ended)

    @property
    def root_fault(self) -> Fault | None:
        """The root cause among the reported faults: the one from which the others follow."""
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
        id, host, address, slots: fields of its record.
        joined: when it joined, by its own clock.
        left_revision: store revision when its key was deleted; 0: present.
        cause: why it left, if known.
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
        run_id: id of the run.
        revision: store revision up to which this is true.
        since_revision: store revision from which on the history is known.
        complete: whether that is the run's beginning; False: earlier history was compacted.
        generations, nodes: the oldest first.
        state, round: current records; None: not written yet.
        present: the nodes that are present now.
        arbiter: id of the node that decides; empty: none.
        boot: record published by rank 0 of the last generation.
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

    ``apply`` takes changes in the order of revisions; ``history`` returns the result.
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
    _faults: set[tuple[int, Fault]] = field(default_factory=set, init=False, repr=False)

    def apply(self, change: Change) -> None:
        """Apply one change."""
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
            self.state = self.round = None  # the run was deleted: later changes belong to a new run with that id
            self.generations.clear()
            self._faults.clear()
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
            # A node that registers again after losing its lease is the same node.
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
        # A member that stays is one object in all generations; else 1,000 nodes and 1,000 generations make a million.
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
        # Any node may close a run, and the state names that node. All other states are written by the arbiter.
        ended = Stamp(content.time, content.node if closed else self.arbiter, revision)
        self.generations[-1] = replace(
            last, ended=ended, reason=content.reason, cause=content.cause, node=content.node, closed=closed
        )

    def _add_fault(self, fault: Fault) -> None:
        for index, generation in enumerate(self.generations):
            if generation.generation == fault.generation and (index, fault) not in self._faults:
                self._faults.add((index, fault))
                self.generations[index] = replace(generation, faults=(*generation.faults, fault))

    def history(self, *, since_revision: int, complete: bool) -> RunHistory:
        """Return the history after the changes so far.

        Arguments:
            since_revision: store revision from which on the changes are known.
            complete: whether that is the beginning of the run.
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
        keys: keys of the run.
        changes: changes in the order of revisions.
    """
    folded = Fold(keys)
    for change in changes:
        folded.apply(change)
    return folded


def read_change(keys: RunKeys, key: bytes, value: bytes | None, revision: int) -> Change | None:
    """Decode a change of a key; None: the history does not use that key, or the value is not a record.

    Arguments:
        keys: keys of the run.
        key: changed key.
        value: current value; None: deleted.
        revision: revision of the change.
    """
    kind, _, name = key.decode("utf-8", "backslashreplace").removeprefix(keys.base).partition("/")
    records: dict[str, type[GenerationRecord | State | Fault | Node]] = {
        "round": GenerationRecord,
        "state": State,
        "fault": Fault,
        "node": Node,
    }
    if (kind not in records and kind not in ("arbiter", "boot", "deny")) or (kind == "round" and name):
        return None
    if value is None:
        return Change(revision, kind, name, None)
    try:
        record = records.get(kind)
        content: Content = value.decode() if record is None else record.decode(value)
        if not isinstance(content, str) and not content.belongs_to(f"{keys.base}{kind}/{name}"):
            return None
    except (RecordError, UnicodeDecodeError):
        return None  # not a record; the run ignores it, and so does its history
    return Change(revision, kind, name, content)


_RUN_KEY: Final = re.compile(r"(?P<run>.+?)/(?:state|round|node/[^/]+)")
_INNER: Final = re.compile(r"/(?:boot|deny|fault|node|store|strike|sync)/")


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run in one line.

    Attributes:
        run_id: run id.
        state: state of the run; None: nodes are present, but nothing is decided yet.
        nodes: present nodes.
        revision: mod revision of the state; 0: there is none.
    """

    run_id: str
    state: State | None
    nodes: int
    revision: int = 0


def interval(keys: RunKeys) -> Sparse:
    """Return the keys of the history, from ``arbiter`` to ``state``; keys of runs below this one lie in between."""
    parts = [below(f"{keys.base}{name}/") for name in ("boot", "deny", "fault", "node")]
    singles = [(key, "") for key in (keys.arbiter, keys.round, keys.state)]
    return Sparse(keys.arbiter, f"{keys.state}\0", (*singles, *parts))


async def list_runs(kv: Client) -> list[RunSummary]:
    """List all runs, by id."""
    found = [item.key async for item in kv.scan(ROOT, prefix=True, keys_only=True)]
    nodes = count_nodes([key.decode("utf-8", "backslashreplace").removeprefix(ROOT) for key in found])
    for part, reads in reads_of_nodes([run_id for run_id, count in nodes.items() if count]):
        _, results = await kv.txn().then(*reads).commit()
        nodes |= {run_id: 0 for run_id, result in zip(part, results, strict=True) if result.succeeded}
    states = await kv.get_many([RunKeys(run_id).state for run_id in nodes])
    return [
        RunSummary(run_id, _state(item), count, 0 if item is None else item.mod_revision)
        for (run_id, count), item in zip(nodes.items(), states, strict=True)
    ]


def count_nodes(names: list[str]) -> dict[str, int]:
    """Count the nodes of each run, from the names of keys below ``ROOT``.

    >>> count_nodes(["jobs/a/node/h-1", "jobs/a/state", "jobs/a/store/3/x/state"])
    {'jobs/a': 1}
    """
    # No run has a longer id. A user of one run may write any key below it, and each part of a name is looked up.
    matches = ((_RUN_KEY.fullmatch(name), name) for name in names)
    found = [(match["run"], name) for match, name in matches if match and len(match["run"].encode()) <= RUN_ID_MAX]
    # Users choose keys inside a run, so one of them may look like a run within the run.
    runs = {run for run, _ in found}
    outer = sorted(run for run in runs if not any(_INNER.match(run, len(other)) for other in _prefixes(run, runs)))
    nodes = dict.fromkeys(outer, 0)
    for run, name in found:
        if run in nodes and name.startswith(f"{run}/node/"):
            nodes[run] += 1
    return nodes


def _prefixes(run: str, runs: set[str]) -> list[str]:
    parts = run.split("/")
    return [prefix for size in range(1, len(parts)) if (prefix := "/".join(parts[:size])) in runs]


def _state(item: KeyValue | None) -> State | None:
    try:
        return None if item is None else State.decode(item.value)
    except RecordError:
        return None


async def read_history(kv: Client, run_id: str) -> RunHistory:
    """Read everything that the store still has about a run.

    Arguments:
        kv: a client of the whole cluster, not a view.
        run_id: run id.

    Raises:
        UnknownRun: the store has no such run.
        ConfigError: the run id is not valid.
        StatusError: the cluster did not answer.
    """
    folded, past = await _replay(kv, run_id)
    return folded.history(since_revision=past.since_revision, complete=past.complete)


async def follow(kv: Client, run_id: str) -> AsyncIterator[tuple[Change | None, Fold]]:
    """Yield the current run (with no change), then every change as it happens, already applied. Never ends by itself.

    A reader that is slower than the compaction misses overwritten values, and continues with the current ones.

    Arguments:
        kv: a client of the whole cluster, not a view.
        run_id: run id.

    Raises:
        As ``read_history``; and ``WatchCanceled`` if a member refuses the watch.
    """
    folded, past = await _replay(kv, run_id)
    yield None, folded
    news: asyncio.Queue[Event | Exception] = asyncio.Queue()

    def on_changes(changes: Sequence[Event]) -> None:
        for event in changes:
            news.put_nowait(event)

    reflector = Reflector(ClientControl(kv), interval(folded.keys), on_changes, on_refused=news.put_nowait)
    reflector.start(past.items.values(), folded.revision)
    try:
        while True:
            event = await news.get()
            if isinstance(event, Exception):
                raise event
            for change in _changes(folded.keys, [event]):
                folded.apply(change)
                yield change, folded
    finally:
        reflector.close()


def _changes(keys: RunKeys, events: Iterable[Event]) -> Iterator[Change]:
    for event in events:
        change = read_change(keys, event.key, event.value if event.type == PUT else None, event.revision)
        if change is not None:
            yield change


async def _replay(kv: Client, run_id: str) -> tuple[Fold, Past]:
    keys = RunKeys(check_run_id(run_id))
    found = await kv.txn().then(*interval(keys).reads()).commit()
    own = Sparse.items(found.results)
    if not own:
        raise UnknownRun(run_id)
    record = [item for item in own if item.key in (keys.round.encode(), keys.state.encode())]
    since = min(item.create_revision for item in record or own)
    past = await read_past(kv, interval(keys), since, (own, found.revision))
    folded = fold(keys, _changes(keys, past.events))
    folded.revision = max(folded.revision, found.revision)
    return folded, past


@dataclass(frozen=True, slots=True)
class Past:
    """The history of an interval of keys.

    Attributes:
        events: in the order of revisions; of what is compacted, the last change of each key that was there then.
        items: the keys that result from the events.
        since_revision: store revision from which on all changes are known.
        complete: whether that is the requested revision; False: earlier history was compacted.
    """

    events: list[Event]
    items: dict[bytes, KeyValue]
    since_revision: int
    complete: bool


def _covers(keys: Interval | Sparse, key: bytes) -> bool:
    return not isinstance(keys, Sparse) or keys.covers(key)


Now = tuple[list[KeyValue], int]
"""The keys of an interval, and the revision at which they were read."""


async def read_past(kv: Client, keys: Interval | Sparse, since: int, now: Now | None = None) -> Past:
    """Read every change of an interval, at least up to its current keys.

    Arguments:
        kv: a client of the whole cluster, not a view.
        keys: the interval; of a sparse interval only its parts.
        since: the first revision.
        now: the current keys; None: they are read.
    """
    if now is None:
        found = await kv.range(keys[0], keys[1])
        now = [item for item in found if _covers(keys, item.key)], found.revision
    complete = True
    while True:
        try:
            events, items = await _events_from(kv, keys, since, now)
        except CompactedError as error:
            since, complete = max(error.revision, since) + 1, False
        else:
            return Past(events, items, since, complete)


async def _events_from(
    kv: Client, keys: Interval | Sparse, since: int, now: Now
) -> tuple[list[Event], dict[bytes, KeyValue]]:
    found, items = list[Event](), dict[bytes, KeyValue]()
    watch = kv.watch(keys[0], keys[1], start_revision=since)
    try:
        await watch.ready()
        events = [Event(PUT, item) for item in await _keys_at(kv, keys, since - 1, watch)]
        wanted = {item.key: item.mod_revision for item in now[0]}
        while True:
            is_further = bool(events) and events[-1].revision > now[1]
            events = [event for event in events if _covers(keys, event.key)]
            found += events
            for event in events:
                if event.type == PUT:
                    items[event.key] = event.kv
                else:
                    items.pop(event.key, None)
            if is_further or {item.key: item.mod_revision for item in items.values()} == wanted:
                return found, items
            events = await watch.next_batch()
    finally:
        watch.cancel()


async def _keys_at(kv: Client, keys: Interval | Sparse, revision: int, watch: Watch) -> list[KeyValue]:
    """Read the keys at a revision, in the order of their last changes."""
    if revision < 1:
        return []
    try:
        found = await kv.range(keys[0], keys[1], revision=revision)
    except CompactedError:
        await watch.next_batch()  # unlike a range, a watch says from which revision on there is history
        raise
    return sorted(found, key=lambda item: item.mod_revision)


# -- progress -------------------------------------------------------------------------------------------------------
#
# The checkpoints in the history of a run: what each generation committed, and how much work its end lost.
#
# ::
#
#     history = await read_progress(kv, await read_history(kv, "job"))
#     for one in history.generations:
#         print(one.generation, [commit.step for commit in one.commits], one.lost)
#
# The commits come from the history of the registry's keys, as generations come from the history of the run's keys, so
# they include checkpoints that retention has deleted since. A checkpoint belongs to the generation in which its save
# began, even if the next generation committed it. The number of its attempt contains a store revision, which identifies
# that generation.
#
# The store does not record single steps, so the cost of a fault is given in seconds, and in steps only as a lower bound
# and an estimate (``Lost``).


@dataclass(frozen=True, slots=True)
class GivenUp:
    """An attempt that was never committed, which shows that the run had reached its step.

    Attributes:
        step: training step.
        began_revision: store revision when it began.
    """

    step: int
    began_revision: int


async def read_progress(kv: Client, history: RunHistory) -> RunHistory:
    """Add commits and the cost of faults to the history of a run; without checkpoints it stays unchanged.

    Arguments:
        kv: a client of the whole cluster, not a view.
        history: history of the run.

    Raises:
        StatusError: the cluster did not answer.
    """
    keys = RegistryKeys(history.run_id)
    records, deleting = [
        await read_past(kv, (prefix, prefix_end(prefix.encode()).decode()), history.since_revision)
        for prefix in (keys.records, keys.deletings)
    ]
    commits = [commit for commit in _commits(records) if commit.kind != MEMORY]
    saved = {commit.saved.revision for commit in commits}
    given_up = [one for one in _attempts(keys, deleting) if one.began_revision not in saved]
    return with_commits(history, commits, given_up)


def _commits(past: Past) -> list[CommitHistory]:
    found: dict[tuple[bytes, int], CommitHistory] = {}
    for event in past.events:
        place = (event.key, event.kv.create_revision)
        if event.type != PUT or place in found:
            continue  # a later change, such as new metrics, is not a commit
        try:
            one = read(Checkpoint, event.kv)
        except RecordError:
            continue  # not a record; the run ignores it, and so does its history
        saved = Stamp(one.time - one.duration_s, one.holder, one.id.began_revision)
        committed = Stamp(one.time, one.holder, event.kv.create_revision)
        found[place] = CommitHistory(one.step, one.kind, one.size_bytes, one.holder, saved, committed)
    return sorted(found.values(), key=lambda one: one.committed.revision)


def _attempts(keys: RegistryKeys, past: Past) -> list[GivenUp]:
    found = {}
    for event in past.events:
        text = event.key.decode("utf-8", "backslashreplace").removeprefix(keys.deletings).partition("/")[2]
        try:
            attempt = AttemptId.parse(text)
        except ValueError:
            continue
        found[attempt] = GivenUp(attempt.step, attempt.began_revision)
    return list(found.values())


def with_commits(history: RunHistory, commits: Sequence[CommitHistory], given_up: Sequence[GivenUp] = ()) -> RunHistory:
    """Add commits and the cost of faults to the history of a run.

    Arguments:
        history: history of the run.
        commits: commits of its checkpoints, oldest first.
        given_up: attempts that were never committed.
    """
    if not commits and not given_up:
        return history
    generations = []
    for place, one in enumerate(history.generations):
        later = history.generations[place + 1 :]
        end = later[0].began.revision if later else history.revision + 1
        own = [commit for commit in commits if one.began.revision <= commit.saved.revision < end]
        kept = [commit for commit in commits if commit.saved.revision < end]
        ahead = [attempt.step for attempt in given_up if one.began.revision <= attempt.began_revision < end]
        generations.append(replace(one, commits=tuple(own), lost=_lost(one, own, kept, ahead)))
    return replace(history, generations=tuple(generations))


def _lost(
    generation: GenerationHistory, own: Sequence[CommitHistory], kept: Sequence[CommitHistory], ahead: Sequence[int]
) -> Lost | None:
    ended = generation.ended
    if ended is None or generation.closed:
        return None
    newest = max(kept, key=lambda commit: commit.step, default=None)
    if newest is None:
        return Lost(None, Duration.between(generation.began, ended), max(ahead, default=0))
    since = Duration.between(newest.saved if newest in own else generation.began, ended)
    same = [commit for commit in own if commit.kind == newest.kind]
    return Lost(newest.step, since, max(0, max(ahead, default=0) - newest.step), _estimated(same, since))


def _estimated(commits: Sequence[CommitHistory], since: Duration) -> int | None:
    if len(commits) < 2:
        return None
    took = commits[-1].saved.time - commits[0].saved.time
    return round((commits[-1].step - commits[0].step) / took * since.seconds) if took > 0 else None
