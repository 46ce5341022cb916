"""raftkv for JAX: rendezvous of processes, and checkpoints that are complete or do not exist.

::

    RAFTKV_JOB=j RAFTKV_ENDPOINTS=h1:2379,h2:2379,h3:2379 RAFTKV_NNODES=2 \\
        python -c "import raftkv.jax, jax; jax.distributed.initialize(); print(jax.process_count())"

    with raftkv.jax.CheckpointManager(registry, save_interval_steps=100, max_to_keep=3) as manager:
        state = manager.restore(like=state) if manager.latest_step() else state
        for step in range(steps):
            manager.save(step, state, metrics={"loss": loss})

    cluster      the cluster environment that JAX uses once this package is imported; lists the variables
    checkpoints  a checkpoint manager like Orbax's, on the registry
    trees        trees of arrays as files

``raftkvctl run`` shows the death of a process and its cause. raftkv does not make JAX survive it: JAX's service is part
of process 0, and a changed world needs a new set of processes.
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
