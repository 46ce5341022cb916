"""When an ``ElasticGroup`` loads a checkpoint, and when it saves one.

A group has state as soon as one of its ranks has: then the furthest rank's counts, and the registry is not asked, so a
recovery waits for nothing. Where all ranks are new, the whole job was started again: it goes on from the latest
checkpoint of the run. What generations before have left undecided is decided then, or before the first save.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from raftkv.errors import ConfigError

if TYPE_CHECKING:
    from raftkv.torch.recovery import ElasticGroup
    from raftkv.training.api.checkpoint import Resumed
    from raftkv.training.api.run import Run, Saving

Load = Callable[["ElasticGroup", "Resumed"], object]
Save = Callable[["ElasticGroup", "Saving"], object]


class States:
    """Loads and saves for one group; see the module, and ``ElasticGroup`` for the arguments."""

    def __init__(self, run: Run, load: Load | None, save: Save | None, save_every: int) -> None:
        if (save is None) != (save_every == 0):
            raise ConfigError("give both save= and save_every=, or neither")
        if save_every < 0:
            raise ConfigError(f"save_every={save_every} cannot be: a number of steps")
        if (load or save) and not run.checkpoints.uri:
            raise ConfigError(
                "there is no place for checkpoints; name one for the run: raftkv.training.join(..., checkpoints=URI)"
            )
        self._run = run
        self._load = load
        self._save = save
        self._every = save_every
        self._decided_in = 0

    @property
    def loads(self) -> bool:
        """Whether a job that starts goes on from a checkpoint."""
        return self._load is not None

    def load(self, group: ElasticGroup, *, is_shared: bool) -> int:
        """Load the latest checkpoint if it is further than the group; returns the step to go on with.

        Arguments:
            group: all of whose ranks call this.
            is_shared: the state is handed out by ``group.source``, which alone loads.

        Raises:
            CheckpointError: it cannot be loaded.
            GenerationOver: the generation ends.
        """
        with self._run.resume() as last:
            self._decided_in = group.generation
            if last is None or last.step <= group.step:
                return group.step
            if self._load is not None and (not is_shared or group.rank == group.source):
                self._load(group, last)
            return last.step

    def save_if_due(self, group: ElasticGroup) -> None:
        """Save the state after ``group.step`` steps, if it is time.

        Raises:
            CheckpointError: it could not be saved.
            GenerationOver: the generation ends; the next one decides whether it was saved.
        """
        if self._save is None or group.step % self._every:
            return
        if self._decided_in != group.generation:
            with self._run.resume():
                self._decided_in = group.generation
        with self._run.checkpoint(group.step) as saving:
            self._save(group, saving)
