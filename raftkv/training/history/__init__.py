"""What happened in a run, out of the history that the store keeps of every key: nothing is logged for it.

::

    history = await read_history(kv, "job")
    for one in history.generations:
        print(one.generation, one.reason, one.recovery)

``reader`` asks the store: a watch that begins at the run's first revision is replayed until it has led to the keys as
they are now. ``timeline`` folds the changes into generations, nodes and faults; it is pure. ``progress`` adds the
commits of checkpoints, and what each fault cost in work.

Invariants: the same changes give the same history; a duration between two clocks says that it is approximate; what was
compacted is missing, and ``complete`` says so.

Leaves out the keys of user code and of torch stores, and how it looks (``raftkv.cli.runs``).
"""
