"""Checkpoints of Lightning in the registry: written to a separate directory, and committed when all ranks have written.

::

    registry = raftkv.checkpoint.Registry(kv, "job", uri="/shared/job")
    saving = RegistryCheckpoint(registry, every_n_train_steps=500, monitor="val_loss", policy=Policy(keep_last=3))
    trainer = lightning.Trainer(callbacks=[saving], ...)
    trainer.fit(model, data, ckpt_path=saving.resume_from())
    trainer.test(model, data, ckpt_path="best")

It replaces ``ModelCheckpoint``: Lightning writes the checkpoint (one file or a directory of shards, depending on the
strategy) directly below the directory of the attempt; then it is digested and committed. Nothing is renamed or deleted
before the new checkpoint is committed.

Metrics. Lightning keeps every value until the next value of the same name, so ``callback_metrics`` may have values of
older steps. A checkpoint gets the metrics measured at its step: with the commit, or later if a validation follows the
save.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from raftkv.checkpoint.commit.summary import Measured
from raftkv.checkpoint.errors import CheckpointNotFound
from raftkv.checkpoint.find import MIN, check_mode
from raftkv.checkpoint.keys import TORCH_SAVE, AttemptId
from raftkv.checkpoint.retention.policy import Best, Policy
from raftkv.checkpoint.saver import Saver, Saving
from raftkv.checkpoint.storage.transfer import HandedOut
from raftkv.checkpoint.storage.verify import require_below
from raftkv.errors import ConfigError
from raftkv.integrations.ranks import barrier, decide, directory_of, is_connected

if TYPE_CHECKING:
    from torch import Tensor

    from raftkv.checkpoint.commit.claim import Claim
    from raftkv.checkpoint.records import Checkpoint
    from raftkv.checkpoint.sync import Registry

    class ModelCheckpoint:
        """Stand-in for the base of checkpoint callbacks, because type checks run without Lightning."""

else:
    try:
        from lightning.pytorch.callbacks import ModelCheckpoint
    except ImportError as missing:
        raise ConfigError(f"raftkv.torch.lightning needs Lightning: pip install lightning ({missing})") from None

_log = logging.getLogger(__name__)

NAME: Final = "lightning.ckpt"
"""Name of the file, or directory, that Lightning writes."""


class RegistryCheckpoint(ModelCheckpoint):
    """Saves and commits at intervals of steps or epochs, at the end of training, and on SIGTERM.

    It is a ``ModelCheckpoint`` for Lightning alone, which looks for the last checkpoint at those; it shares no code.

    Arguments:
        registry: registry of the run, with a ``uri``.
        every_n_train_steps: 0: not by steps.
        every_n_epochs: at the end of epochs, after their validation; 0: not by epochs, if there are steps.
        monitor: metric by which the best is found, and kept; empty: the first of the policy's ``keep_best``.
        mode: ``min`` or ``max``: which of its values are better.
        save_on_exception: save when training fails too; not with several ranks, of which one may have failed alone.
        claim: under which is written, as that of a generation of a run; None: a new one.
        policy: which checkpoints are kept after each commit; None: all.
        kind: kind of the checkpoints; ``dcp`` for strategies that write shards.
        weights_only: the model alone, without what resuming needs.
        directory: download directory for checkpoints that are not on a local disk.
        anywhere: load a checkpoint from anywhere; otherwise only from below the ``uri`` of the registry.

    Raises:
        ConfigError: a number is negative, or there is no such mode.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        every_n_train_steps: int = 0,
        every_n_epochs: int = 0,
        monitor: str = "",
        mode: str = MIN,
        save_on_exception: bool = False,
        claim: Claim | None = None,
        policy: Policy | None = None,
        kind: str = TORCH_SAVE,
        weights_only: bool = False,
        directory: str = "",
        anywhere: bool = False,
    ) -> None:
        if every_n_train_steps < 0 or every_n_epochs < 0:
            raise ConfigError("a checkpoint is saved every 1 or more steps or epochs; give 0 for never")
        best = Best(monitor, check_mode(mode)) if monitor else None
        self._saver = Saver(registry, claim=claim, policy=policy, monitor=best)
        self._steps = every_n_train_steps
        self._epochs = every_n_epochs or (0 if every_n_train_steps else 1)
        self._kind, self._weights_only, self._directory, self._anywhere = kind, weights_only, directory, anywhere
        self.save_on_exception = save_on_exception
        self._last_step = 0
        self._measured: dict[str, tuple[Tensor, tuple[int, int], int]] = {}
        self._paths: dict[AttemptId, str] = {}
        self._handed = HandedOut(registry)

    # ---- finding

    def resume_from(self) -> str | None:
        """Return the path of the newest checkpoint, verified, for ``fit(ckpt_path=...)``, or None.

        All ranks ask. Processes that Lightning starts inherit the answer of the first one.

        Raises:
            DigestMismatch: a file of it is missing, or is not the committed one.
            ConfigError: this is one of several ranks, and none of them can ask the first one.
        """
        saver = self._saver
        found = directory_of(
            saver, lambda: saver.newest(self._kind), self._directory, self._handed,
            inherited=True, anywhere=self._anywhere,
        )  # fmt: skip
        return None if found is None else f"{found}/{NAME}"

    @property
    def best_model_path(self) -> str:
        """Return the path of the best checkpoint, verified; empty: there is none. Without a metric it is the newest.

        Raises:
            CheckpointNotFound: there are checkpoints, and none has the metric.
            DigestMismatch, StorageError: it could not be read.
            ConfigError: it lies at a URL, and there is no ``directory`` to put it to; or not below the registry's uri.
        """
        if not self.last_model_path:
            return ""
        best = self._handed.pinned(lambda: self._saver.best(self._kind))
        return self.last_model_path if best is None else self._path(best)

    @property
    def last_model_path(self) -> str:
        """Return the path of the newest checkpoint, verified; empty: there is none. Errors as ``best_model_path``."""
        try:
            found = self._handed.pinned(lambda: self._saver.registry.latest(self._kind))
        except CheckpointNotFound:
            return ""
        return "" if found is None else self._path(found)

    def _path(self, found: Checkpoint) -> str:
        path = self._paths.get(found.id)
        if path is None or not self._handed.take_again(path):
            if not self._anywhere:
                require_below(found, self._saver.registry.uri)
            path = self._paths[found.id] = self._handed.take(found, self._directory)
        return f"{path}/{NAME}"

    def _find_last_checkpoints(self, trainer: Any) -> set[str]:
        """Answer ``ckpt_path="last"``."""
        return {path for path in (self.last_model_path,) if path}

    # ---- what Lightning keeps of a callback

    @property
    def state_key(self) -> str:
        """Return the name of its state in a checkpoint."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state, because everything is in the registry."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Ignore the state."""

    # ---- saving

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check the checkpoint just before the load, because a pickle may run code. Raises DigestMismatch if it was
        changed."""
        self._handed.check_before()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Check the checkpoint after the load. Raises DigestMismatch if it was changed during the read."""
        if trainer.state.fn != "fit":
            barrier()
            self._handed.check()

    on_test_start = on_predict_start = on_validation_start

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Claim the checkpoints, so that an earlier start of the job can no longer save.

        Raises:
            DigestMismatch: the checkpoint to continue from was changed while it was read.
        """
        barrier()
        self._handed.check()
        self._last_step = int(trainer.global_step)
        decide(lambda: str(self._saver.claim().generation))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save if a save is due."""
        self._observe(trainer)
        if self._steps and int(trainer.global_step) % self._steps == 0:
            self._save(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Add the metrics of a validation to the checkpoint of its step, if it is already saved."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._observe(trainer)
            self._add_metrics(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Save if a save is due."""
        self._observe(trainer)
        if self._epochs and (int(trainer.current_epoch) + 1) % self._epochs == 0:
            self._save(trainer)
        self._add_metrics(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save at the end of training."""
        self._save(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Save after a SIGTERM on all ranks, or, with ``save_on_exception``, when a single process fails."""
        is_stopped = isinstance(exception, SystemExit) and bool(trainer.received_sigterm)
        if trainer.state.fn != "fit" or trainer.sanity_checking or not (is_stopped or self.save_on_exception):
            return
        if not is_stopped and is_connected():
            _log.warning("raftkv: no checkpoint is saved after %s, because the other ranks cannot take part", exception)
            return
        try:
            self._save(trainer)
        except Exception as error:  # the one to tell is that which ended training
            _log.warning("raftkv: the last checkpoint (step %d) could not be saved: %s", trainer.global_step, error)

    def _observe(self, trainer: Any) -> None:
        """Record the step of new values; Lightning makes a new tensor for each."""
        for name, value in trainer.callback_metrics.items():
            mark = value.data_ptr(), value._version
            if name not in self._measured or self._measured[name][1] != mark:
                # The tensor is held: no other gets its address meanwhile.
                self._measured[name] = value, mark, int(trainer.global_step)

    def _metrics(self, step: int) -> dict[str, Measured]:
        """Return the values that may be metrics at a step; others are not fetched from their device."""
        return {
            name: Measured(value.item(), measured)
            for name, (value, _, measured) in self._measured.items()
            if value.numel() == 1 and measured == step
        }

    def _add_metrics(self, trainer: Any) -> None:
        step = int(trainer.global_step)

        def add() -> str:
            self._saver.add_metrics(step, self._metrics(step))
            return ""

        if step == self._last_step:
            decide(add)

    def _save(self, trainer: Any) -> None:
        step = int(trainer.global_step)
        if step == self._last_step or trainer.fast_dev_run:
            return  # gradients are still accumulated, or the epoch ends with a step that is saved
        with ExitStack() as stack:
            opened: list[Saving] = []

            def begin() -> str:
                opened.append(stack.enter_context(self._saver.saving(step, kind=self._kind)))
                return opened[0].uri

            def finish() -> str:
                opened[0].metrics.update(self._saver.chosen(step, self._metrics(step)))
                stack.pop_all().close()
                return opened[0].uri

            trainer.save_checkpoint(f"{decide(begin)}/{NAME}", self._weights_only)
            decide(finish)
        self._last_step = step
