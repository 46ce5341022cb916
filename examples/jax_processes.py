"""JAX processes find each other through raftkv: no address, no number of processes, no process id given by hand.

By itself this starts a cluster and two processes. With RAFTKV_JOB=name, and RAFTKV_ENDPOINTS, it is one process of that
job, on as many machines as you like. Needs jax.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import raftkv


def work() -> None:
    """One process: all that it needs of raftkv is an import."""
    import jax
    from jax.experimental import multihost_utils

    import raftkv.jax  # noqa: F401  JAX asks it where the others are

    jax.distributed.initialize()
    all_ids = multihost_utils.process_allgather(jax.numpy.array(jax.process_index()))
    if jax.process_index() == 0:
        print("processes:", jax.process_count(), "ids:", sorted(all_ids.tolist()))


def show() -> None:
    """A cluster, and two processes of one job."""
    with raftkv.local(size=3) as cluster:
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "RAFTKV_JOB": "example",
            "RAFTKV_ENDPOINTS": ",".join(cluster.endpoints),
            "RAFTKV_NNODES": "2",
        }
        processes = [subprocess.Popen([sys.executable, __file__], env=environment) for _ in range(2)]
        print("all ended well:", [process.wait() for process in processes] == [0, 0])


if __name__ == "__main__":
    if importlib.util.find_spec("jax") is None:
        sys.exit("this example needs JAX: pip install jax==0.10.2")
    if "RAFTKV_JOB" in os.environ:
        work()
    else:
        show()
