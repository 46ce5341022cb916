"""What can go wrong in a run: one line each, saying what, where and what to do."""

from __future__ import annotations

from raftkv.errors import UNAVAILABLE, RaftKVError, StatusError


class TrainingError(RaftKVError):
    """Any of the errors below."""


class RunClosed(TrainingError):
    """The run is over; no generation begins in it any more while one of its nodes is there."""

    def __init__(self, run_id: str, reason: str) -> None:
        because = f": {reason}" if reason else ""
        super().__init__(f"run {run_id!r} is closed{because}")
        self.run_id = run_id
        self.reason = reason


class ClusterAway(TrainingError, StatusError):
    """The cluster did not answer a node, or a worker, that starts."""

    code = UNAVAILABLE

    def __init__(self, run_id: str, endpoints: str, timeout_s: float, why: StatusError) -> None:
        super().__init__(
            f"run {run_id!r} cannot be joined: the cluster at {endpoints} did not answer within {timeout_s:g} s "
            f"({why}); start it or correct the endpoints, and start this again (connect_timeout says how long to try)"
        )


class JoinTimeout(TrainingError):
    """No generation that includes this node began in time; the line says how far it was."""

    def __init__(self, run_id: str, timeout_s: float, why: str) -> None:
        super().__init__(f"run {run_id!r} did not begin within {timeout_s:g} s: {why}")
        self.run_id = run_id


class RunConflict(TrainingError):
    """Nodes of the same run id were started with other limits: two jobs with one id, most likely."""

    def __init__(self, run_id: str, theirs: str, ours: str) -> None:
        super().__init__(
            f"run {run_id!r} is in use with {theirs} nodes, this node was started with {ours}: "
            "start all nodes of a job alike, and give every job an id of its own"
        )
        self.run_id = run_id


class GenerationOver(TrainingError):
    """The generation has ended, or goes on without this node: nothing was written; come back to the rendezvous."""

    definite = True

    def __init__(self, run_id: str, generation: int, reason: str = "") -> None:
        because = f": {reason}" if reason else ""
        super().__init__(f"generation {generation} of run {run_id!r} is over{because}")
        self.run_id = run_id
        self.generation = generation
        self.reason = reason

    @property
    def epoch(self) -> int:
        """Alias of ``generation``."""
        return self.generation


EpochOver = GenerationOver
"""Alias."""


class StateLost(TrainingError):
    """No rank has a whole state any more: the one that had it was lost while it handed it out."""

    def __init__(self, run_id: str) -> None:
        super().__init__(
            f"run {run_id!r}: the rank that had the state was lost while it handed it out, and there is no checkpoint "
            "to load; start the job again from where its state is kept (ElasticGroup(..., load=, save=) does so itself)"
        )
        self.run_id = run_id
