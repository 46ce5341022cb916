"""The errors of a run, with one-line messages: what happened, where, and what to do."""

from __future__ import annotations

import warnings
from typing import Any

from raftkv.errors import UNAVAILABLE, RaftKVError, StatusError


def warn_deprecated(old: str, new: str) -> None:
    """Issue a DeprecationWarning for a previous name, at the caller's caller."""
    warnings.warn(f"{old} is deprecated; use {new}", DeprecationWarning, stacklevel=3)


class DeprecatedAlias:
    """A previous name of an attribute: it warns, and returns the value of the current name."""

    def __init__(self, new: str) -> None:
        self._old, self._new = "", new

    def __set_name__(self, owner: type, name: str) -> None:
        self._old = name

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is None:
            return self
        warn_deprecated(self._old, self._new)
        return getattr(instance, self._new)


class TrainingError(RaftKVError):
    """Any of the errors below."""


class RunClosed(TrainingError):
    """The run is closed; no new generation begins in it while one of its nodes is present."""

    def __init__(self, run_id: str, reason: str) -> None:
        because = f": {reason}" if reason else ""
        super().__init__(f"run {run_id!r} is closed{because}")
        self.run_id = run_id
        self.reason = reason


class ClusterAway(TrainingError, StatusError):
    """The cluster did not answer a starting node or worker in time."""

    code = UNAVAILABLE

    def __init__(self, run_id: str, endpoints: str, timeout_s: float, why: StatusError) -> None:
        super().__init__(
            f"run {run_id!r} cannot be joined: the cluster at {endpoints} did not answer within {timeout_s:g} s "
            f"({why}); start it or correct the endpoints, and start this again (connect_timeout says how long to try)"
        )


class JoinTimeout(TrainingError):
    """No generation that includes this node began in time; the message says what was missing."""

    def __init__(self, run_id: str, timeout_s: float, why: str) -> None:
        super().__init__(f"run {run_id!r} did not begin within {timeout_s:g} s: {why}")
        self.run_id = run_id


class RunConflict(TrainingError):
    """Nodes of the same run id were started with other limits; most likely two jobs use one id."""

    def __init__(self, run_id: str, theirs: str, ours: str) -> None:
        super().__init__(
            f"run {run_id!r} is in use with {theirs} nodes, this node was started with {ours}: "
            "start all nodes of a job alike, and give every job a different id"
        )
        self.run_id = run_id


class GenerationOver(TrainingError):
    """The generation has ended, or continues without this node. Nothing was written; rejoin the rendezvous."""

    definite = True

    def __init__(self, run_id: str, generation: int, reason: str = "") -> None:
        because = f": {reason}" if reason else ""
        super().__init__(f"generation {generation} of run {run_id!r} is over{because}")
        self.run_id = run_id
        self.generation = generation
        self.reason = reason

    epoch = DeprecatedAlias("generation")


class StateLost(TrainingError):
    """No rank has complete state any more: the last one that had it died while sending it to the others."""

    def __init__(self, run_id: str) -> None:
        super().__init__(
            f"run {run_id!r}: the rank that had the state was lost while it handed it out, and there is no checkpoint "
            "to load; start the job again from where its state is kept (ElasticGroup(..., load=, save=) does so itself)"
        )
        self.run_id = run_id


class BarrierTimeout(TrainingError, TimeoutError):
    """Some ranks did not reach a barrier, or did not give their value, in time; another call continues to wait.

    Arguments:
        what: what was waited for.
        timeout_s: time to wait.
        missing: missing ranks; None: the cluster does not answer.

    Attributes:
        missing: missing ranks; empty: unknown, or all have arrived by now.
    """

    definite = False

    def __init__(self, what: str, timeout_s: float, missing: list[int] | None) -> None:
        self.missing = missing or []
        shown = ", ".join(map(str, self.missing[:16])) + (", ..." if len(self.missing) > 16 else "")
        who = "the cluster does not answer" if missing is None else "all have come by now"
        if missing:
            who = f"missing: rank{'s' if len(missing) > 1 else ''} {shown}"
        super().__init__(f"{what} was not complete within {timeout_s:g} s; {who}")


class PostedLost(TrainingError):
    """A key was deleted before this rank saw it: its name was used again, and the history was compacted."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} was missed: a later use of the name has replaced it, and the store has compacted its history; "
            "leave the generation, and continue in the next"
        )


class UnknownRun(TrainingError):
    """The store has no run with this id."""

    def __init__(self, run_id: str) -> None:
        super().__init__(f"there is no run {run_id!r}; `raftkvctl run list` lists the runs")
        self.run_id = run_id
