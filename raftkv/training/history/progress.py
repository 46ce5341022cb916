"""The checkpoints in the history of a run: what each generation committed, and what its end cost in work.

::

    history = await read_progress(kv, await read_history(kv, "job"))
    for one in history.generations:
        print(one.generation, [commit.step for commit in one.commits], one.lost)

The commits come from the history of the registry's keys, as generations do from that of the run's: those that
retention has deleted since are there too. A checkpoint belongs to the generation in which its saving began, which the
number of its attempt says, for a revision of the store is in it. So one that the next generation has taken over counts
for the generation that it saves from being lost.

Leaves out the steps themselves: nobody writes them down, so what a fault cost is said in seconds, and in steps only as
a lower bound and as an estimate (``timeline.Lost``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from raftkv.checkpoint.keys import AttemptId, RegistryKeys
from raftkv.checkpoint.records import Checkpoint
from raftkv.client.control.records import RecordError, read
from raftkv.client.scope import prefix_end
from raftkv.client.values import PUT
from raftkv.training.history.reader import Past, read_past
from raftkv.training.history.timeline import (
    CommitHistory,
    Duration,
    GenerationHistory,
    Lost,
    RunHistory,
    Stamp,
)

if TYPE_CHECKING:
    from raftkv.client.library import Client


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
            continue  # somebody else wrote it; the run goes on without it, and so does its history
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
