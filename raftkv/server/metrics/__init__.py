"""The metrics of a member for Prometheus, under etcd's names, so that etcd's dashboards and alerts work.

Owns which families /metrics has. The parts of a member count for themselves, in plain integers and ``Buckets``
(``raftkv.histograms``); a collector here reads them when it is scraped and gives them their names.

    exposition     the text of families, in slices between which the loop does other work
    (``raftkv.replica.metrics`` has those of the replica: its collectors are registered here with the others)
    calls          grpc_server_*, requests by client version, users, health, durations of calls (--metrics=extensive)
    peers          the other members: bytes, failures, round trips
    budgets        what has a limit: how much of it is used

Laws:

- A scrape waits for nothing but another scrape; a turn of the loop gives it ``loop.limiter.TEXT_SLICE_S``.
- What the hot path counts is one increment of a plain integer, or is taken once a turn.
- Every family of etcd 3.5 is here, or docs/reference/compatibility.md says why not (a test compares).

Example::

    registry = new_registry()
    for collector in replica.metrics():
        registry.register(collector)
    text = await Exposition(registry)()
"""
