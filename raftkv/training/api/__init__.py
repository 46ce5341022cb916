"""The training API: what user code sees of a run; ``raftkv.training.join`` and ``raftkv.training.aio.join`` lead here.

::

    with raftkv.training.join("job", min_nodes=2, max_nodes=4) as run:
        run.barrier("start")
        number = run.counter("steps").add(1)
        with run.elect("writer") as leadership:
            run.kv.put("progress", b"7", fence=leadership)

``async_run`` is the run, for asyncio; ``run`` wraps it for programs without an event loop. A run stands on an
*attachment* (its own participant, or the node of the agent that has started this worker) and, for each generation, on a
``generation.Generation`` with its counters, leadership and ``Collectives`` (barrier, broadcast, gather), which
share one watch for all waits of a rank.

Invariants:

1. Every write carries the fence of its generation: a rank that missed the end writes nothing and raises
   ``GenerationOver``.
2. The end of a generation interrupts all waits in it at once.
3. A call is repeated until the cluster answers, and done twice it is as good as done once.

Leaves out large values (256 KiB at most: share the address of what is larger) and the tensors' own collectives, which
are torch's or JAX's.
"""
