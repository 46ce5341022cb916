"""The training API for user code; ``raftkv.training.join`` and ``raftkv.training.aio.join`` are defined here.

::

    with raftkv.training.join("job", min_nodes=2, max_nodes=4) as run:
        run.barrier("start")
        number = run.counter("steps").add(1)
        with run.elect("writer") as leadership:
            run.kv.put("progress", b"7", fence=leadership)

``async_run`` is the run, for asyncio; ``run`` wraps it for programs without an event loop. A run consists of an
*attachment* (its own participant, or the node of the agent that started this worker) and, for each generation, a
``generation.Generation`` with its counters, leadership and ``Collectives`` (barrier, broadcast, gather), which share
one watch for all waits of a rank.

Invariants:

1. Every write carries the fence of its generation. A rank that missed the end writes nothing and raises
   ``GenerationOver``.
2. The end of a generation interrupts all waits in it at once.
3. Every call is idempotent, and is repeated until the cluster answers.

Not here: values above 256 KiB (share the address of larger data), and collectives on tensors, which are torch's or
JAX's.
"""
