"""Training runs and checkpoints for Prometheus: what ``raftkvctl run metrics`` serves.

A member knows nothing of runs: they are keys. So these metrics come from a client, which watches the keys. One such
program is enough for a cluster; two give the same figures.

    runs           nodes, world, generation, faults, time without a world: out of the folded history
    checkpoints    commits, attempts, the newest of each kind
    queues         slots of clusters that runs share, and who waits for them
    exporter       watches the store and fills the three

Invariants:

- Everything is by watch: no key is asked for at a scrape. New runs are looked for every ``DISCOVERY_S``.
- What a run went through comes from the history of its keys (``training.history``), so counters of runs go on after a
  restart of the exporter, as far as history is not compacted. Attempts are counted from its start on.
- A counter never goes back while a run exists; series of a run that is deleted end.

Example::

    async with Exporter(kv) as exporter:
        text = generate_latest(exporter.registry)

Leaves out HTTP (``raftkv.cli.runs.metrics``) and metrics that users give to checkpoints, of which there may be many.
"""
