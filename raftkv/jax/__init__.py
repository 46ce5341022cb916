"""raftkv for JAX: processes that find each other, and checkpoints that exist whole or not at all.

::

    RAFTKV_JOB=j RAFTKV_ENDPOINTS=h1:2379,h2:2379,h3:2379 RAFTKV_NNODES=2 \\
        python -c "import raftkv.jax, jax; jax.distributed.initialize(); print(jax.process_count())"

    with raftkv.jax.CheckpointManager(registry, save_interval_steps=100, max_to_keep=3) as manager:
        state = manager.restore(like=state) if manager.latest_step() else state
        for step in range(steps):
            manager.save(step, state, metrics={"loss": loss})

    cluster      importing this is enough: JAX asks it who takes part (see there for the variables)
    checkpoints  a manager as Orbax has one, on the registry
    trees        trees of arrays as files

A process that dies is seen in ``raftkvctl run``, with its cause. What JAX itself does not survive, it does not survive
here: its service is a part of process 0 and its world does not change; a new world is a new set of processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raftkv.jax.cluster import RaftKVCluster

if TYPE_CHECKING:
    from raftkv.jax.checkpoints import CheckpointManager as CheckpointManager

__all__ = ["CheckpointManager", "RaftKVCluster"]


def __getattr__(name: str) -> Any:
    if name != "CheckpointManager":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from raftkv.jax.checkpoints import CheckpointManager

    return CheckpointManager
