"""Reading the history of a run out of the store: every change of its keys, from its first on.

::

    runs = await list_runs(kv)
    history = await read_history(kv, "job")
    async for change, fold in follow(kv, "job"): ...

Owns the questions to the store. The changes come from a watch that begins in the past: at the revision in which the
run's record was created, or, when that is compacted, right behind the compaction, from a copy of the keys as they were
then (``complete`` is False). A watch has no end, so the reader first takes a copy of the keys as they are now, and
stops when the changes have led to that copy.

Nothing is written. Keys of user code and of torch stores (``store/``, ``sync/``) are not read.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from raftkv.checkpoint.keys import AttemptId, RegistryKeys
from raftkv.checkpoint.records import Checkpoint
from raftkv.client.control import ClientControl, Reflector
from raftkv.client.records import RecordError, read
from raftkv.client.scope import prefix_end
from raftkv.client.values import PUT, Event, KeyValue
from raftkv.errors import CompactedError
from raftkv.training.errors import UnknownRun
from raftkv.training.keys import ROOT, RunKeys, check_run_id
from raftkv.training.records import State
from raftkv.training.timeline import (
    Change,
    CommitHistory,
    Duration,
    Fold,
    GenerationHistory,
    Lost,
    RunHistory,
    Stamp,
    read_change,
)

if TYPE_CHECKING:
    from raftkv.client.library import Client
    from raftkv.client.values import RangeResult
    from raftkv.client.watch import Watch

_RUN_KEY: Final = re.compile(r"(?P<run>.+?)/(?:state|round|node/[^/]+)")
_INNER: Final = re.compile(r"/(?:boot|deny|fault|node|store|strike|sync)/")


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run in one line.

    Attributes:
        run_id: its id.
        state: what is going on; None: nodes are there, but nothing is decided yet.
        nodes: that are there.
        revision: mod revision of the state; 0: there is none.
    """

    run_id: str
    state: State | None
    nodes: int
    revision: int = 0


def interval(keys: RunKeys) -> tuple[str, str]:
    """First key and end of what history is made of: from ``arbiter`` to ``state``."""
    return keys.arbiter, keys.record[1]


async def list_runs(kv: Client) -> list[RunSummary]:
    """List all runs, by id."""
    found = [item.key async for item in kv.scan(ROOT, prefix=True, keys_only=True)]
    nodes = count_nodes([key.decode("utf-8", "backslashreplace").removeprefix(ROOT) for key in found])
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
    found = [(match["run"], name) for name in names if (match := _RUN_KEY.fullmatch(name))]
    # The keys inside a run are its users' own: one of them may look like a run within the run.
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
    """Read everything that the store still knows of a run.

    Arguments:
        kv: a client of the whole cluster, not a view.
        run_id: which run.

    Raises:
        UnknownRun: nothing is known of it.
        ConfigError: that cannot be the id of a run.
        StatusError: the cluster did not answer.
    """
    replay = await _replay(kv, run_id)
    return replay.history()


async def follow(kv: Client, run_id: str) -> AsyncIterator[tuple[Change | None, Fold]]:
    """Yield the run as it is (with no change), then every change as it happens, already applied. Never ends by itself.

    A reader that is slower than the store forgets misses what was overwritten since, and goes on with what is there.

    Arguments:
        kv: a client of the whole cluster, not a view.
        run_id: which run.

    Raises:
        As ``read_history``; and ``WatchCanceled`` if a member refuses to go on.
    """
    replay = await _replay(kv, run_id)
    yield None, replay.fold
    news: asyncio.Queue[Event | Exception] = asyncio.Queue()

    def on_changes(changes: Sequence[Event]) -> None:
        for event in changes:
            news.put_nowait(event)

    reflector = Reflector(ClientControl(kv), interval(replay.keys), on_changes, on_refused=news.put_nowait)
    reflector.start(replay.items, replay.fold.revision)
    try:
        while True:
            event = await news.get()
            if isinstance(event, Exception):
                raise event
            change = read_change(replay.keys, event.key, _value(event), event.revision)
            if change is not None:
                replay.fold.apply(change)
                yield change, replay.fold
    finally:
        reflector.close()


def _value(event: Event) -> bytes | None:
    return event.value if event.type == PUT else None


@dataclass
class _Replay:
    keys: RunKeys
    fold: Fold
    items: list[KeyValue]
    since_revision: int
    complete: bool

    def history(self) -> RunHistory:
        return self.fold.history(since_revision=self.since_revision, complete=self.complete)


async def _replay(kv: Client, run_id: str) -> _Replay:
    keys = RunKeys(check_run_id(run_id))
    now = await kv.range(*interval(keys))
    record = [item for item in now if item.key.decode() in (keys.round, keys.state)]
    if not now.items:
        raise UnknownRun(run_id)
    past = await read_past(kv, interval(keys), min(item.create_revision for item in record or now.items), now)
    fold = Fold(keys)
    for event in past.events:
        change = read_change(keys, event.key, _value(event), event.revision)
        if change is not None:
            fold.apply(change)
    fold.revision = max(fold.revision, now.revision)
    return _Replay(keys, fold, list(past.items.values()), past.since_revision, past.complete)


@dataclass(frozen=True, slots=True)
class Past:
    """What an interval of keys went through.

    Attributes:
        events: in the order of revisions; of what is compacted, the last change of each key that was there then.
        items: the keys to which they have led.
        since_revision: from which on all changes are known.
        complete: whether that is the one that was asked for; False: what was before is compacted.
    """

    events: list[Event]
    items: dict[bytes, KeyValue]
    since_revision: int
    complete: bool


async def read_past(kv: Client, keys: tuple[str, str], since: int, now: RangeResult | None = None) -> Past:
    """Read every change of an interval, until they have led to the keys as they are now, or further.

    Arguments:
        kv: a client of the whole cluster, not a view.
        keys: first key and end.
        since: the first revision.
        now: the keys as they are; None: they are read.
    """
    now = await kv.range(*keys) if now is None else now
    complete = True
    while True:
        try:
            events, items = await _events_from(kv, keys, since, now)
        except CompactedError as error:
            since, complete = max(error.revision, since) + 1, False
        else:
            return Past(events, items, since, complete)


async def _events_from(
    kv: Client, keys: tuple[str, str], since: int, now: RangeResult
) -> tuple[list[Event], dict[bytes, KeyValue]]:
    found, items = list[Event](), dict[bytes, KeyValue]()
    watch = kv.watch(*keys, start_revision=since)
    try:
        await watch.ready()
        events = [Event(PUT, item) for item in await _keys_at(kv, keys, since - 1, watch)]
        wanted = {item.key: item.mod_revision for item in now}
        while True:
            found += events
            for event in events:
                if event.type == PUT:
                    items[event.key] = event.kv
                else:
                    items.pop(event.key, None)
            is_further = bool(events) and events[-1].revision > now.revision
            if is_further or {item.key: item.mod_revision for item in items.values()} == wanted:
                return found, items
            events = await watch.next_batch()
    finally:
        watch.cancel()


async def _keys_at(kv: Client, keys: tuple[str, str], revision: int, watch: Watch) -> list[KeyValue]:
    """Read the keys as they were then, in the order of their last changes."""
    if revision < 1:
        return []
    try:
        found = await kv.range(*keys, revision=revision)
    except CompactedError:
        await watch.next_batch()  # a range tells only that it is so, a watch from where on there is history
        raise
    return sorted(found, key=lambda item: item.mod_revision)


# -- progress -------------------------------------------------------------------------------------------------------
#
# The checkpoints in the history of a run: what each generation committed, and what its end cost in work.
#
# ::
#
#     history = await read_progress(kv, await read_history(kv, "job"))
#     for one in history.generations:
#         print(one.generation, [commit.step for commit in one.commits], one.lost)
#
# The commits come from the history of the registry's keys, as generations do from that of the run's: those that
# retention has deleted since are there too. A checkpoint belongs to the generation in which its saving began, which the
# number of its attempt says, for a revision of the store is in it. So one that the next generation has taken over
# counts for the generation that it saves from being lost.
#
# Leaves out the steps themselves: no record holds them, so the cost of a fault is said in seconds, and in steps only as
# a lower bound and as an estimate (``timeline.Lost``).


@dataclass(frozen=True, slots=True)
class GivenUp:
    """An attempt that was never committed: the run had reached its step.

    Attributes:
        step: of training.
        began_revision: of the store, when it began.
    """

    step: int
    began_revision: int


async def read_progress(kv: Client, history: RunHistory) -> RunHistory:
    """Add commits, and what faults cost, to the history of a run; it stays as it is if there are no checkpoints.

    Arguments:
        kv: a client of the whole cluster, not a view.
        history: of the run.

    Raises:
        StatusError: the cluster did not answer.
    """
    keys = RegistryKeys(history.run_id)
    records, deleting = [
        await read_past(kv, (prefix, prefix_end(prefix.encode()).decode()), history.since_revision)
        for prefix in (keys.records, keys.deletings)
    ]
    commits = _commits(records)
    saved = {commit.saved.revision for commit in commits}
    given_up = [one for one in _attempts(keys, deleting) if one.began_revision not in saved]
    return with_commits(history, commits, given_up)


def _commits(past: Past) -> list[CommitHistory]:
    found: dict[tuple[bytes, int], CommitHistory] = {}
    for event in past.events:
        place = (event.key, event.kv.create_revision)
        if event.type != PUT or place in found:
            continue  # a later change, as of its metrics, is no commit
        try:
            one = read(Checkpoint, event.kv)
        except RecordError:
            continue  # a foreign value; the run goes on without it, and so does its history
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
    """Add commits, and what faults cost, to the history of a run.

    Arguments:
        history: of the run.
        commits: of its checkpoints, the oldest first.
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
