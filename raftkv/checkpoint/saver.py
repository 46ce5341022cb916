"""One process that saves the checkpoints of a program: rank 0 of a framework that knows when all have written.

::

    saver = Saver(registry, policy=Policy(keep_last=3))
    newest = saver.newest()                          # of before; what dead writers have left is decided first
    saver.save_directory(400, "out/checkpoint-400", kind=SAFETENSORS, metrics={"loss": 0.1})
    with saver.saving(800, kind=TORCH_SAVE) as saving:
        torch.save(state, f"{saving.uri}/model.pt")  # whatever lies below the uri at the end is the checkpoint

It claims the checkpoints when it is first used: every writer that was there before is fenced out. The callbacks for
frameworks (``raftkv.torch.transformers``, ``raftkv.torch.lightning``, ``raftkv.jax``) stand on it. Blocking. Leaves out
ranks that prepare parts of their own: ``run.checkpoint`` and ``raftkv.torch.checkpoint``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from raftkv.checkpoint.commit.claim import Claim
from raftkv.checkpoint.commit.summary import checked_metrics
from raftkv.checkpoint.errors import CheckpointNotFound
from raftkv.checkpoint.kinds import FILES
from raftkv.checkpoint.records import Checkpoint
from raftkv.checkpoint.retention.policy import Policy
from raftkv.checkpoint.storage.local import digest_tree, make_directory, taken_in
from raftkv.checkpoint.sync import Attempt, Registry
from raftkv.errors import RaftKVError, StatusError


@dataclass
class Saving:
    """A checkpoint that is being saved.

    Attributes:
        uri: of the directory of its bytes, which is this attempt's alone.
        metrics: what is in it at the end of the block counts.
        checkpoint: what was committed; None before the end of the block.
    """

    uri: str
    metrics: dict[str, float] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None


class Saver:
    """Save and find checkpoints of a program of one process.

    Arguments:
        registry: of the run.
        claim: under which is written; None: a new one, with the first use.
        policy: what is kept after each commit; None: everything.
    """

    def __init__(self, registry: Registry, *, claim: Claim | None = None, policy: Policy | None = None) -> None:
        self.registry = registry
        self.policy = policy
        self._claim = claim
        self._is_settled = False

    def claim(self) -> Claim:
        """Return the claim under which this writes; what dead writers have left is decided the first time.

        Raises:
            FenceBroken, GenerationOver: it is over.
        """
        if self._claim is None:
            self._claim = self.registry.claim()
        if not self._is_settled:
            self.registry.take_over(self._claim)
            self._is_settled = True
        return self._claim

    def newest(self, kind: str = "") -> Checkpoint | None:
        """Return the newest checkpoint, to go on from; None: there is none. Errors as for ``claim``."""
        self.claim()
        try:
            return self.registry.latest(kind)
        except CheckpointNotFound:
            return None

    @contextmanager
    def saving(
        self,
        step: int,
        *,
        kind: str = FILES,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Iterator[Saving]:
        """Save whatever lies below ``uri`` at the end of the block; a block that raises commits nothing.

        Arguments:
            step: of training; above the latest.
            kind: one of ``kinds.KINDS``.
            metrics: by which the best is found.
            metadata: of the user.

        Raises:
            CheckpointExists, StaleStep: the step, or a later one, is committed.
            FenceBroken, GenerationOver: the claim is over; nothing was committed.
            StorageError: the bytes could not be read again, or the manifest not be written.
        """
        attempt = self.registry.begin(self.claim(), step, kind=kind, metadata=metadata)
        saving = Saving(attempt.uri, dict(metrics or {}))
        with _aborting(attempt):
            make_directory(attempt.uri)
            yield saving
            attempt.prepare(0, digest_tree(attempt.uri))
            saving.checkpoint = attempt.commit(metrics=saving.metrics)
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
        """Save a local directory that somebody has written; it is moved below the uri of the registry.

        Arguments:
            step, kind, metrics, metadata: as for ``saving``; so are the errors.
            directory: it is gone afterwards; as it was, if the disk fails, or what is given cannot be used.
        """
        metrics = checked_metrics(metrics)  # before anything is moved
        attempt = self.registry.begin(self.claim(), step, kind=kind, metadata=metadata)
        with _aborting(attempt), taken_in(directory, attempt.uri) as files:
            attempt.prepare(0, files)
            done = attempt.commit(metrics=metrics)
        self._collect()
        return done

    def _collect(self) -> None:
        if self.policy is not None:
            with suppress(StatusError):  # the next collection goes on
                self.registry.collect(self.policy)


@contextmanager
def _aborting(attempt: Attempt) -> Iterator[None]:
    """Give an attempt up if the block raises; if that fails too, the next claim does it."""
    try:
        yield
    except BaseException as error:
        with suppress(RaftKVError):  # as when the client is closed: the first error is the one to tell
            attempt.give_up(error)
        raise
