"""Saves checkpoints from one process: a single-process program, or rank 0 of a framework that synchronises its ranks.

::

    saver = Saver(registry, policy=Policy(keep_last=3))
    newest = saver.newest()                          # commits or aborts attempts of dead writers first
    saver.save_directory(400, "out/checkpoint-400", kind=SAFETENSORS, metrics={"loss": 0.1})
    with saver.saving(800, kind=TORCH_SAVE) as saving:
        torch.save(state, f"{saving.uri}/model.pt")  # all files below the uri at the end are the checkpoint

The first use claims the checkpoints, which fences out every earlier writer. The callbacks for frameworks
(``raftkv.torch.transformers``, ``raftkv.torch.lightning``, ``raftkv.jax``) use it. Blocking. If ranks prepare separate
parts, use ``run.checkpoint`` or ``raftkv.torch.checkpoint``.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from raftkv.checkpoint.commit.claim import Claim
from raftkv.checkpoint.commit.summary import checked_metrics, measured_at, usable
from raftkv.checkpoint.errors import CheckpointNotFound
from raftkv.checkpoint.keys import FILES, METRICS_MAX
from raftkv.checkpoint.records import Checkpoint
from raftkv.checkpoint.retention.policy import Best, Policy
from raftkv.checkpoint.storage.transfer import digest_tree, make_directory, taken_in
from raftkv.checkpoint.sync import Attempt, Registry
from raftkv.errors import RaftKVError, StatusError

_log = logging.getLogger(__name__)


@dataclass
class Saving:
    """A checkpoint that is being saved.

    Attributes:
        uri: directory of the files, used only by this attempt.
        metrics: metrics; the content at the end of the block is saved.
        checkpoint: committed checkpoint; None before the end of the block.
    """

    uri: str
    metrics: dict[str, float] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None


class Saver:
    """Saves and finds checkpoints of a program from one process.

    Arguments:
        registry: registry of the run.
        claim: claim under which it writes; None: a new one, at the first use.
        policy: which checkpoints are kept after each commit; None: all.
        monitor: metric whose best checkpoint the program loads at its end, and which is therefore kept too.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        claim: Claim | None = None,
        policy: Policy | None = None,
        monitor: Best | None = None,
    ) -> None:
        self.registry = registry
        self.policy = policy
        self.monitor: Best | None = None
        self._claim = claim
        self._is_settled = False
        self._last: Checkpoint | None = None
        self._has_told = False
        self.keep_best(monitor)

    def keep_best(self, monitor: Best | None) -> None:
        """From now on also keep the best checkpoint by a metric, besides those of the policy."""
        self.monitor = monitor
        if monitor is not None and self.policy is not None:
            self.policy = self.policy.with_best(monitor)

    def best(self, kind: str = "") -> Checkpoint | None:
        """Return the best checkpoint by ``monitor``, else by the first of the policy's ``keep_best``; None: neither.

        Raises:
            CheckpointNotFound: no checkpoint has the metric.
        """
        best = next(iter(self._bests()), None)
        return None if best is None else self.registry.best(best.metric, best.mode, kind=kind)

    def _bests(self) -> list[Best]:
        return [*([self.monitor] if self.monitor else []), *(self.policy.keep_best if self.policy else ())]

    def claim(self) -> Claim:
        """Return the claim for writing; the first call commits or aborts the attempts of dead writers.

        Raises:
            FenceBroken, GenerationOver: the claim has ended.
        """
        if self._claim is None:
            self._claim = self.registry.claim()
        if not self._is_settled:
            self.registry.take_over(self._claim)
            self._is_settled = True
        return self._claim

    def newest(self, kind: str = "") -> Checkpoint | None:
        """Return the newest checkpoint, to resume from, or None. Errors as for ``claim``."""
        self.claim()
        try:
            self._last = self.registry.latest(kind)
        except CheckpointNotFound:
            return None
        return self._last

    @contextmanager
    def saving(
        self,
        step: int,
        *,
        kind: str = FILES,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Iterator[Saving]:
        """Save all files below ``uri`` at the end of the block; a block that raises commits nothing.

        Arguments:
            step: training step, above the latest.
            kind: one of ``keys.KINDS``.
            metrics: metrics by which the best is found.
            metadata: user metadata.

        Raises:
            CheckpointExists, StaleStep: the step, or a later one, is committed.
            FenceBroken, GenerationOver: the claim has ended; nothing was committed.
            StorageError: the files could not be read again, or the manifest could not be written.
        """
        attempt = self.registry.begin(self.claim(), step, kind=kind, metadata=metadata)
        saving = Saving(attempt.uri, dict(metrics or {}))
        with _aborting(attempt):
            make_directory(attempt.uri)
            yield saving
            attempt.prepare(0, digest_tree(attempt.uri), metrics=saving.metrics)
            saving.checkpoint = self._last = attempt.commit()
        self._collect()

    def save_directory(
        self,
        step: int,
        directory: str,
        *,
        kind: str = FILES,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Checkpoint:
        """Save a completely written local directory by moving it below the uri of the registry.

        Arguments:
            step, kind, metrics, metadata: as for ``saving``; so are the errors.
            directory: moved away by this call; unchanged if the disk fails or an argument cannot be used.
        """
        metrics = checked_metrics(metrics, step)  # before anything is moved
        attempt = self.registry.begin(self.claim(), step, kind=kind, metadata=metadata)
        with _aborting(attempt), taken_in(directory, attempt.uri) as files:
            attempt.prepare(0, files, metrics=metrics)
            done = self._last = attempt.commit()
        self._collect()
        return done

    def chosen(self, step: int, given: Mapping[str, object]) -> dict[str, float]:
        """Choose the metrics of a checkpoint among a framework's values; the omitted ones are logged once.

        Values that ``monitor`` or the policy name come first; a checkpoint has at most 60.

        Arguments:
            step: step of the checkpoint; values measured at another step (``Measured``) are omitted.
            given: name to any value.
        """
        named = {best.metric for best in self._bests()}
        there = set(self._last.metrics) if self._last is not None and self._last.step == step else set()
        found: dict[str, float] = {}
        left_out = []
        for name, value in usable(measured_at(given, step), named).items():
            if name in there | named or len(there | named) < METRICS_MAX:
                found[name] = value
                there.add(name)
            else:
                left_out.append(name)
        if left_out and not self._has_told:
            self._has_told = True
            _log.warning(
                "raftkv: a checkpoint has at most %d metrics: step %d lacks %d of this job's, such as %s; name those "
                "that matter in keep_best of the policy, or log fewer", METRICS_MAX, step, len(left_out), left_out[0],
            )  # fmt: skip
        return found

    def add_metrics(self, step: int, given: Mapping[str, object]) -> None:
        """Add values measured at a step after its checkpoint was committed, unless there is a later checkpoint."""
        if self._last is not None and self._last.step == step:
            found = self.chosen(step, given)
            if found.items() - self._last.metrics.items():
                with suppress(CheckpointNotFound):  # deleted meanwhile
                    self._last = self.registry.set_metrics(step, self._last.kind, found)

    def _collect(self) -> None:
        if self.policy is not None:
            with suppress(StatusError):  # the next collection continues
                self.registry.collect(self.policy)


@contextmanager
def _aborting(attempt: Attempt) -> Iterator[None]:
    """Abort an attempt if the block raises; if that fails too, the next claim does it."""
    try:
        yield
    except BaseException as error:
        with suppress(RaftKVError):  # as when the client is closed: report the first error
            attempt.give_up(error)
        raise


class Termination:
    """Delays SIGTERM until the program has saved; a second SIGTERM ends it at once.

    Forked children end at the first SIGTERM.

    ::

        told.hold()                      # on the main thread; elsewhere it does nothing
        if told.is_asked: save()
        told.deliver()                   # to the previous handler: the program ends as it would have

    Attributes:
        is_asked: whether the program received SIGTERM.
    """

    def __init__(self) -> None:
        self.is_asked = False
        self._before: Callable[[int, FrameType | None], Any] | int | None = None
        self._process_id = 0

    def hold(self) -> None:
        """Delay the signal from now on, unless it is ignored."""
        is_main = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGTERM)
        if is_main and self._before is None and before not in (signal.SIG_IGN, None):
            self._before, self._process_id = before, os.getpid()
            signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.is_asked or os.getpid() != self._process_id:
            self.deliver()
        self.is_asked = True

    def let_go(self) -> None:
        """Restore the previous handler, on the main thread."""
        before, is_main = self._before, threading.current_thread() is threading.main_thread()
        self._before = None
        if is_main and before is not None and signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, before)

    def deliver(self) -> None:
        """End the program as it would have ended, now that it has saved."""
        self.let_go()
        signal.raise_signal(signal.SIGTERM)
