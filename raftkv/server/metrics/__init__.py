"""The metrics of a member for Prometheus, under etcd's names, so that etcd's dashboards and alerts work.

Owns the list of metric families of /metrics. The parts of a member count for themselves, in plain integers and
``Buckets`` (``raftkv.histograms``); a function here reads these at each scrape and adds the names.

    exposition     the text of all families, built in slices with pauses for other work
    (``raftkv.replica.metrics`` has the functions for the parts of the replica; ``Member`` calls all)
    calls          grpc_server_*, requests by client version, users, health, durations of calls (--metrics=extensive)
    peers          the other members: bytes, failures, round trips
    budgets        how much of each limit is used

Laws:

- A scrape waits only for other scrapes; a loop turn spends at most ``loop.limiter.TEXT_SLICE_S`` on it.
- Counting on the hot path is one increment of a plain integer, or one measurement per turn.
- Every family of etcd 3.5 is here, or docs/reference/compatibility.md says why not (a test compares).

Example::

    registry = new_registry()
    registry.register(Collecting(replica.metrics))
    text = await Exposition(registry)()
"""
