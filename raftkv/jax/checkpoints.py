"""A checkpoint manager for JAX, like Orbax's, on the registry.

::

    registry = raftkv.checkpoint.Registry(kv, "job", uri="s3://bucket/job")
    with CheckpointManager(registry, save_interval_steps=100, max_to_keep=3) as manager:
        if manager.latest_step() is not None:
            state = manager.restore(like=state)
        for step in range(first, steps):
            state, loss = train(state)
            manager.save(step, state, metrics={"loss": loss})      # copies to the host, writes on a thread
        # the end of the block (or of the program, without a block) waits for the last save

With several processes (``jax.distributed``) all of them create the manager and call ``save`` and ``restore`` at the
same steps. Each writes its shards; the checkpoint exists when all have written and process 0 has committed it. It uses
no barrier of JAX's coordination service and no marker file.

Not supported: restoring only the shards of this process (each process reads all shards, and keeps those of its
sharding), and items besides one tree (put them into the tree).
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final, Self

import jax
import numpy as np
from jax.experimental import multihost_utils

from raftkv.checkpoint.commit.claim import Claim
from raftkv.checkpoint.commit.summary import checked_metrics
from raftkv.checkpoint.errors import CheckpointError, CheckpointNotFound
from raftkv.checkpoint.find import MIN
from raftkv.checkpoint.keys import ORBAX
from raftkv.checkpoint.records import Checkpoint
from raftkv.checkpoint.retention.policy import Best, Policy
from raftkv.checkpoint.saver import Termination
from raftkv.checkpoint.storage.rank_files import RankFiles
from raftkv.checkpoint.storage.verify import load_manifest, read_verified
from raftkv.checkpoint.sync import Attempt, Registry
from raftkv.errors import ConfigError, RaftKVError, StatusError
from raftkv.jax.trees import Part, describe, rebuild, write_parts

_log = logging.getLogger(__name__)

TREE: Final = "tree.json"
TOKEN_BYTES: Final = 1024
JOIN_TIMEOUT_S: Final = 600.0
"""How long other processes wait for process 0 to begin a save."""


class CheckpointManager:
    """Saves and restores trees of arrays.

    Arguments:
        registry: registry of the run, with a ``uri``.
        save_interval_steps: ``save`` saves only at multiples of this, unless it is forced.
        max_to_keep: number kept after each commit, besides the best by ``best_metric``; None: all.
        best_metric, best_mode: metric of ``best_step``, which is always kept; ``min`` or ``max``.
        policy: rules for the kept checkpoints, instead of ``max_to_keep``.
        claim: claim under which to write, the same for all processes; None: a new one.
        is_async: whether ``save`` returns when the arrays are copied; False: when the checkpoint is committed.

    Raises:
        ConfigError: an argument is not valid.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        save_interval_steps: int = 1,
        max_to_keep: int | None = None,
        best_metric: str = "",
        best_mode: str = MIN,
        policy: Policy | None = None,
        claim: Claim | None = None,
        is_async: bool = True,
    ) -> None:
        if save_interval_steps < 1:
            raise ConfigError(f"a checkpoint is saved every {save_interval_steps} steps; give 1 or more")
        self._registry = registry
        self._interval = save_interval_steps
        self._best = best_metric, best_mode
        if policy is None and max_to_keep is not None:
            policy = Policy(keep_last=max_to_keep)
        self._policy = policy.with_best(Best(best_metric, best_mode)) if policy and best_metric else policy
        self._is_async = is_async
        self._claim = _shared(registry, claim)
        self._thread = ThreadPoolExecutor(1, "raftkv-checkpoint")
        self._under_way: Future[None] | None = None
        self._attempt_number = 0
        self._last: int | None = self.latest_step()
        self._committed = self._last
        self._process_id = os.getpid()
        self._told = Termination()
        if jax.process_count() == 1:  # several processes learn it from JAX
            self._told.hold()
        _managers.add(self)

    # ---- finding

    def latest_step(self) -> int | None:
        """Return the step of the newest checkpoint, or None."""
        try:
            return self._registry.latest(ORBAX).step
        except CheckpointNotFound:
            return None

    def best_step(self) -> int | None:
        """Return the step of the best checkpoint by ``best_metric``; None: no checkpoint has the metric."""
        try:
            return self._registry.best(*self._best, kind=ORBAX).step
        except CheckpointNotFound:
            return None

    def all_steps(self) -> list[int]:
        """Return the steps of all checkpoints, oldest first."""
        return [found.step for found in self._registry.checkpoints(ORBAX)]

    # ---- saving

    def should_save(self, step: int) -> bool:
        """Return whether ``save`` would save a step: at the interval, and after a SIGTERM."""
        return (self._last is None or step > self._last) and (self._is_ending(step) or step % self._interval == 0)

    def _is_ending(self, step: int) -> bool:
        """Return whether the job received SIGTERM; all processes return the same value at a step."""
        if jax.process_count() == 1:
            return self._told.is_asked
        with suppress(RuntimeError):  # JAX's service for this is disabled
            return bool(multihost_utils.reached_preemption_sync_point(step))
        return False

    def save(
        self, step: int, tree: Any, *, metrics: Mapping[str, float] | None = None, is_forced: bool = False
    ) -> bool:
        """Save a tree of arrays; False: this step is not saved. Waits for the previous save.

        Call this at every step: after a SIGTERM, the next step is saved independent of the interval. A single process
        then exits; several processes continue until they are killed, as usual in JAX.

        Arguments:
            step: training step, above the latest.
            tree: tree of arrays and numbers; may be changed after the return.
            metrics: metrics by which the best is found.
            is_forced: save also at a step outside the interval.

        Raises:
            ConfigError: a leaf cannot be saved, or a metric is not a number.
            and the error of the previous save.
        """
        if not self.should_save(step) and not is_forced:
            return False
        is_ending = self._told.is_asked
        self.wait_until_finished()
        values = checked_metrics(metrics, step)
        layout, parts = describe(tree)
        self._under_way = self._thread.submit(self._save, step, layout, parts, values)
        self._last = step
        if not self._is_async or is_ending:
            self.wait_until_finished()
        if is_ending:
            self._told.deliver()
        return True

    def wait_until_finished(self) -> None:
        """Wait for the running save.

        Raises:
            CheckpointExists, StaleStep: the step, or a later one, is committed.
            FenceBroken, GenerationOver: another job has claimed the checkpoints.
            ConfigError: process 0 saves another step.
            AttemptOver: another process has failed.
            StorageError: the files could not be written.
        """
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            try:
                under_way.result()
            except BaseException:
                self._last = self._committed  # the step may be saved again, for example after a full disk
                raise
            self._committed = self._last

    def _save(self, step: int, layout: dict[str, Any], parts: list[Part], metrics: dict[str, float]) -> None:
        if jax.process_index() == 0:
            attempt = self._registry.begin(self._claim, step, world_size=jax.process_count(), kind=ORBAX)
        else:
            who = f"process {jax.process_index()}"
            attempt = self._registry.join(
                self._claim, step, kind=ORBAX, timeout_s=JOIN_TIMEOUT_S, after=self._attempt_number, who=who
            )
            self._attempt_number = attempt.record.number
        try:
            self._write(attempt, layout, parts, metrics)
        except BaseException as error:
            with suppress(RaftKVError):  # as when the client is closed: report the first error
                attempt.give_up(error, f"process {jax.process_index()}")
            raise

    def _write(self, attempt: Attempt, layout: dict[str, Any], parts: list[Part], metrics: dict[str, float]) -> None:
        files, rank = RankFiles(attempt.uri), jax.process_index()
        with files.open(f"arrays-{rank:06d}.safetensors") as file:
            write_parts(file, parts)
        if rank != 0:
            attempt.prepare(rank, files.finish())
            attempt.outcome()
            return
        files.write(TREE, json.dumps(layout).encode())
        attempt.prepared(but=[0])
        attempt.prepare(0, files.finish(), metrics=metrics)
        attempt.commit()
        if self._policy is not None:
            with suppress(StatusError):  # the next collection continues
                self._registry.collect(self._policy)

    # ---- restoring

    def restore(self, step: int | None = None, *, like: Any = None) -> Any:
        """Return the tree of a checkpoint after verifying its digests. The checkpoint is pinned meanwhile.

        Arguments:
            step: step of the checkpoint; None: the newest.
            like: a tree of the same structure, whose arrays (or ``jax.ShapeDtypeStruct``) give shapes and shardings;
                None: plain containers, on the default device.

        Raises:
            CheckpointNotFound: there is no such checkpoint.
            DigestMismatch: a file is missing or differs from the committed one.
            ConfigError: the tree differs from ``like`` in structure, shapes or dtypes.
            PinLost: this process was frozen for so long that the checkpoint may have been deleted meanwhile.
        """
        self.wait_until_finished()
        while True:
            found = self._registry.latest(ORBAX) if step is None else self._registry.at(step, ORBAX)
            pin = self._registry.pin(found, f"{socket.gethostname()}:{os.getpid()}")
            try:
                pin.take()
            except CheckpointNotFound:
                if step is None:
                    continue  # deleted after a later commit
                raise
            try:
                tree = restore(found, like=like)
                pin.check()
            finally:
                pin.release()
            return tree

    # ---- its end

    def close(self) -> None:
        """Wait for the running save, and close; errors as for ``wait_until_finished``."""
        try:
            self.wait_until_finished()
        finally:
            self._told.let_go()
            self._thread.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_managers: Final[weakref.WeakSet[CheckpointManager]] = weakref.WeakSet()


def _finish_all() -> None:
    """Wait for running saves when a program ends without having closed its managers."""
    for manager in list(_managers):
        if manager._process_id != os.getpid():
            continue  # in a forked child: the parent saves
        try:
            manager.close()
        except Exception as error:
            _log.error("raftkv: the checkpoint in progress at the end of the program was not saved: %s", error)


# A private function, but the only way: ``atexit`` callbacks run when threads no longer accept work. Functions
# registered here run in reverse order, so this one runs before that of ``concurrent.futures``, imported above.
threading._register_atexit(_finish_all)  # type: ignore[attr-defined]


def restore(checkpoint: Checkpoint, *, like: Any = None) -> Any:
    """Return the tree of a checkpoint of any run. Arguments and errors as for ``CheckpointManager.restore``."""
    files = {file.name: file for _, file in load_manifest(checkpoint).files}
    if TREE not in files:
        raise ConfigError(f"{checkpoint.reference} was not saved by raftkv.jax; load it with the tool that wrote it")
    try:
        layout = json.loads(read_verified(checkpoint, TREE, file=files[TREE]))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{checkpoint.reference}: {TREE} is not JSON: {error}") from None
    arrays = (read_verified(checkpoint, name, file=file) for name, file in files.items() if name != TREE)
    return rebuild(layout, arrays, like)


def _shared(registry: Registry, claim: Claim | None) -> Claim:
    """Claim for all processes, and commit or abort attempts of dead writers; a collective call if there are several."""
    failure: RaftKVError | None = None
    token = ""
    if jax.process_index() == 0:
        try:
            claim = claim or registry.claim()
            registry.take_over(claim)
            token = claim.token
        except RaftKVError as error:
            failure = error
    if jax.process_count() > 1:
        padded = np.frombuffer(token.encode().ljust(TOKEN_BYTES), np.uint8)
        told = np.asarray(multihost_utils.broadcast_one_to_all(padded)).astype(np.uint8)
        token = told.tobytes().decode().rstrip()
    if failure is not None:
        raise failure
    if not token:
        raise CheckpointError("process 0 could not claim the checkpoints; its error says why")
    return claim if claim is not None else Claim.from_token(token)
