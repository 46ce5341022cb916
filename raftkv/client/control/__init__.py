"""The ground of programs that keep state in the store: training runs, checkpoints, datasets.

    control     the part of a client that such a program uses, so that a simulator can stand in for the store
    reflector   a local copy of keys: lists them, watches on, survives compaction and outages
    retries     calls that are made again until the store answers
    records     small JSON records as the values of keys, checked when they are read

    control = ClientControl(kv)
    copy = Reflector(control, below("jobs/"), on_changes)

Nothing here knows what the keys mean. Invariant: no wall clock and no randomness, so that a simulation replays exactly.
"""
