"""Checkpoints of the Hugging Face Trainer in the registry: complete, fenced, visible on every machine.

::

    registry = raftkv.checkpoint.Registry(kv, "job", uri="/shared/job")
    callback = RegistryCallback(registry, policy=Policy(keep_last=3, keep_best=[Best("eval_loss")]))
    trainer = Trainer(model, TrainingArguments("out", save_steps=500), callbacks=[callback], ...)
    trainer.train(resume_from_checkpoint=callback.resume_from())

The Trainer writes its folder as usual. Then all ranks wait for each other, and the folder is checked for completeness
(``importers.trainer``), moved below the URI of the registry, digested and committed. So a job never resumes from the
folder of a crash, and two starts of one job do not mix their files. ``save_total_limit`` has no effect; ``policy``
decides which checkpoints stay. The best by ``metric_for_best_model`` stays under every policy, and
``load_best_model_at_end`` loads it, also from an earlier start of the job or from a URL. On SIGTERM the job saves and
exits.

All ranks must see the same ``output_dir``. Each start of the job writes to a new directory below it
(``generation-<n>``), to which ``TrainingArguments.output_dir`` is set during training.
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from raftkv.checkpoint.errors import CheckpointNotFound, DigestMismatch, NotWhole, StorageError
from raftkv.checkpoint.find import MAX, MIN
from raftkv.checkpoint.retention.policy import Best, Policy
from raftkv.checkpoint.saver import Saver, Termination
from raftkv.checkpoint.storage.place import Place
from raftkv.checkpoint.storage.transfer import HandedOut, local_directory
from raftkv.checkpoint.storage.verify import require_below
from raftkv.errors import ConfigError
from raftkv.integrations.importers import trainer as folders
from raftkv.integrations.importers.source import Source
from raftkv.integrations.ranks import barrier, decide, directory_of, is_any

if TYPE_CHECKING:
    from raftkv.checkpoint.commit.claim import Claim
    from raftkv.checkpoint.records import Checkpoint
    from raftkv.checkpoint.sync import Registry

    class TrainerCallback:
        """Stand-in for the base of the Trainer's callbacks, because type checks run without transformers."""

else:
    try:
        from transformers import TrainerCallback
    except ImportError as missing:
        raise ConfigError(
            f"raftkv.torch.transformers needs transformers: pip install transformers ({missing})"
        ) from None

_log = logging.getLogger(__name__)


class RegistryCallback(TrainerCallback):
    """Commits each checkpoint that the Trainer saves.

    Arguments:
        registry: registry of the run, with a ``uri``.
        claim: under which is written, as that of a generation of a run; None: a new one.
        policy: which checkpoints are kept after each commit; None: all.
        directory: download directory for checkpoints that are not on a local disk.
        anywhere: load a checkpoint from anywhere; otherwise only from below the ``uri`` of the registry.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        claim: Claim | None = None,
        policy: Policy | None = None,
        directory: str = "",
        anywhere: bool = False,
    ) -> None:
        self._saver = Saver(registry, claim=claim, policy=policy)
        self._directory, self._anywhere = directory, anywhere
        self._output = ""
        self._step = -1
        self._told = Termination()
        self._handed, self._is_loading = HandedOut(registry), False
        self._is_ending = False

    def resume_from(self, kind: str = "") -> str | None:
        """Return the verified path of the newest checkpoint, for ``resume_from_checkpoint=``; called by all ranks.

        Arguments:
            kind: empty: of the kind of the newest.

        Raises:
            DigestMismatch: a file of it is missing, or is not the committed one.
            ConfigError: this is one of several ranks, and ``torch.distributed`` does not connect them yet.
        """
        self._is_loading = True
        saver = self._saver
        return directory_of(saver, lambda: saver.newest(kind), self._directory, self._handed, anywhere=self._anywhere)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Claim the checkpoints, and let the Trainer write to a directory that is new for this start of the job.

        Raises:
            ConfigError: the best model is to be loaded from a URL, and there is no ``directory`` to put it to.
        """
        if args.metric_for_best_model is not None:
            name = f"eval_{args.metric_for_best_model.removeprefix('eval_')}"
            self._saver.keep_best(Best(name, MAX if args.greater_is_better else MIN))
        uri = self._saver.registry.uri
        if args.load_best_model_at_end and not self._directory and not Place(uri).is_local:
            raise ConfigError(
                f"load_best_model_at_end needs RegistryCallback(directory=PATH): {uri} is not a local disk"
            )
        generation, best = json.loads(decide(lambda: json.dumps(self._begin(state))))
        if state.best_global_step:
            state.best_model_checkpoint = best or None
        self._output = args.output_dir
        args.output_dir = os.path.join(args.output_dir, f"generation-{generation}")
        self._told.hold()

    def _begin(self, state: Any) -> tuple[int, str]:
        """Return the generation, and the verified path of the best checkpoint; empty: it does not exist any more.

        The Trainer has noted where it was written, and anything may lie there by now.
        """
        generation, best = self._saver.claim().generation, ""
        if state.best_global_step:
            with suppress(CheckpointNotFound):
                found = self._saver.registry.at(state.best_global_step)
                if not self._anywhere:
                    require_below(found, self._saver.registry.uri)
                try:
                    best = local_directory(found) if Place(found.uri).is_local else found.uri
                except (DigestMismatch, StorageError) as error:
                    _log.warning("raftkv: the best checkpoint so far can no longer be loaded: %s", error)
        return generation, best

    def _check_loaded(self) -> None:
        """Raise DigestMismatch if the loaded files were changed during the load; called by all ranks."""
        if self._is_loading:
            self._is_loading = False
            barrier()
            self._handed.check()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restore the user's ``output_dir``.

        Raises:
            DigestMismatch: the model that was loaded was changed while it was read.
        """
        self._told.let_go()
        if self._output:
            with suppress(OSError):
                os.rmdir(args.output_dir)  # it is empty, unless something besides checkpoints was written
            args.output_dir, self._output = self._output, ""
        self._check_loaded()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Set the best checkpoint at the end of training; the Trainer loads it next.

        Raises:
            DigestMismatch: a file of it is missing, or is not the committed one.
        """
        if args.load_best_model_at_end and "train_runtime" in (logs or ()):
            self._is_loading = True
            state.best_model_checkpoint = directory_of(
                self._saver, self._best, self._directory, self._handed, anywhere=self._anywhere
            )

    def _best(self) -> Checkpoint | None:
        try:
            return self._saver.best()
        except CheckpointNotFound as error:
            _log.warning(
                "raftkv: load_best_model_at_end found no best checkpoint, the last model stays loaded: %s", error
            )
            return None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save and stop if any rank has received SIGTERM.

        Raises:
            DigestMismatch: the checkpoint to continue from was changed while it was read.
        """
        self._check_loaded()
        if is_any(self._told.is_asked, args.device):
            control.should_save = control.should_training_stop = self._is_ending = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Commit what all ranks have written.

        Raises:
            NotWhole: the folder lacks a file.
            CheckpointExists, StaleStep: the step, or a later one, is committed: the job did not resume from the newest.
            FenceBroken, GenerationOver: another job has claimed the checkpoints; end this one.
            StorageError: the bytes could not be moved.
        """
        barrier()
        step = int(state.global_step)
        if step != self._step:  # else it is saved at the end of an epoch too
            folder = os.path.join(args.output_dir, f"checkpoint-{step}")
            path = decide(lambda: self._commit(folder, state))
            self._step = step
            if state.best_model_checkpoint == folder:
                state.best_model_checkpoint = path
        if self._is_ending:
            self._told.deliver()

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Add the metrics of an evaluation to a committed step; those before the save are saved with it."""
        if self._output:  # after training the model may be the best one, loaded again
            self._saver.add_metrics(int(state.global_step), folders.measured(state.log_history))

    def _commit(self, folder: str, state: Any) -> str:
        """Commit a folder; return its new path, if it is on a local disk."""
        source = Source(folder)
        candidates = folders.detect(source.listing)
        if not candidates:
            raise NotWhole(folder, "the Trainer has written no checkpoint there")
        source.check(candidates[0].sources)
        folders.inspect(candidates[0], source)
        step = int(state.global_step)
        noted = self._saver.chosen(step, folders.measured(state.log_history))
        done = self._saver.save_directory(step, folder, kind=candidates[0].kind, metrics=noted)
        place = Place(done.uri)
        return place.root if place.is_local else done.uri
