"""Checkpoints of Lightning in the registry: each is written to a place of its own, and committed when all have written.

::

    saving = RegistryCheckpoint(raftkv.checkpoint.Registry(kv, "job", uri="/shared/job"), every_n_train_steps=500)
    trainer = lightning.Trainer(callbacks=[saving], ...)
    trainer.fit(model, data, ckpt_path=saving.resume_from())

It takes the place of ``ModelCheckpoint``: Lightning writes the checkpoint (one file, or a directory of shards, as the
strategy has it) directly below the directory of the attempt, then it is digested and committed with the metrics that
were logged. Nothing is renamed or deleted before the new one is committed.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from raftkv.checkpoint.importers.candidate import numeric
from raftkv.checkpoint.kinds import TORCH_SAVE
from raftkv.checkpoint.saver import Saver
from raftkv.errors import ConfigError
from raftkv.torch.ranks import decide, newest_directory

if TYPE_CHECKING:
    from raftkv.checkpoint.commit.claim import Claim
    from raftkv.checkpoint.retention.policy import Policy
    from raftkv.checkpoint.saver import Saving
    from raftkv.checkpoint.sync import Registry

    class Checkpoint:
        """The base of callbacks that save; Lightning is not there when types are checked."""

else:
    try:
        from lightning.pytorch.callbacks import Checkpoint
    except ImportError as missing:
        raise ConfigError(f"raftkv.torch.lightning needs Lightning: pip install lightning ({missing})") from None

NAME: Final = "lightning.ckpt"
"""Name of the file, or directory, that Lightning writes."""


class RegistryCheckpoint(Checkpoint):
    """Saves every so many steps, or epochs, and commits.

    Arguments:
        registry: of the run, with a uri.
        every_n_train_steps: 0: not by steps.
        every_n_epochs: at the end of epochs, after their validation; 0: not by epochs, if there are steps.
        claim: under which is written, as that of a generation of a run; None: a new one.
        policy: which checkpoints are kept after each commit; None: all.
        kind: of the checkpoints; ``dcp`` for strategies that write shards.
        weights_only: the model alone, without what resuming needs.
        directory: for checkpoints that do not lie on a local disk: where ``resume_from`` puts them.

    Raises:
        ConfigError: a number is negative.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        every_n_train_steps: int = 0,
        every_n_epochs: int = 0,
        claim: Claim | None = None,
        policy: Policy | None = None,
        kind: str = TORCH_SAVE,
        weights_only: bool = False,
        directory: str = "",
    ) -> None:
        if every_n_train_steps < 0 or every_n_epochs < 0:
            raise ConfigError("a checkpoint is saved every 1 or more steps or epochs; give 0 for never")
        self._saver = Saver(registry, claim=claim, policy=policy)
        self._steps = every_n_train_steps
        self._epochs = every_n_epochs or (0 if every_n_train_steps else 1)
        self._kind, self._weights_only, self._directory = kind, weights_only, directory
        self._last_step = 0

    def resume_from(self) -> str | None:
        """Return the path of the newest checkpoint, verified, for ``fit(ckpt_path=...)``; None: there is none.

        All ranks ask. Processes that Lightning starts inherit the answer of the first one.

        Raises:
            DigestMismatch: a file of it is missing, or is not what was committed.
            ConfigError: this is one of several ranks, and none of them can ask the first one.
        """
        found = newest_directory(self._saver, self._kind, self._directory, inherited=True)
        return None if found is None else f"{found}/{NAME}"

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Claim the checkpoints, so that a job before this one saves nothing any more."""
        self._last_step = int(trainer.global_step)
        decide(lambda: str(self._saver.claim().generation))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save, if it is time."""
        if self._steps and int(trainer.global_step) % self._steps == 0:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Save, if it is time."""
        if self._epochs and (int(trainer.current_epoch) + 1) % self._epochs == 0:
            self._save(trainer)

    def _save(self, trainer: Any) -> None:
        step = int(trainer.global_step)
        if step == self._last_step:
            return  # gradients are still accumulated, or the epoch ends with a step that is saved
        with ExitStack() as stack:
            opened: list[Saving] = []

            def begin() -> str:
                opened.append(stack.enter_context(self._saver.saving(step, kind=self._kind)))
                return opened[0].uri

            def finish() -> str:
                logged = {name: value.item() for name, value in trainer.callback_metrics.items() if value.numel() == 1}
                opened[0].metrics.update(numeric(logged))
                stack.pop_all().close()
                return opened[0].uri

            trainer.save_checkpoint(f"{decide(begin)}/{NAME}", self._weights_only)
            decide(finish)
        self._last_step = step
