"""``raftkvctl bench``: measures the rate and latency of calls, events, leases and locks of a cluster.

    command, check -> Bench: members, processes -> load: the clients of each -> result

Invariants:

- The clock starts when all connections are open; requests are encoded before they are sent.
- Latency is the time from sending to answer, of every call.
- Ctrl-C prints the measurement so far.

Example: ``raftkvctl bench put --total 100000 --clients 100``. Read ``load``, then ``command``.
Comparisons with etcd are in ``bench/``.
"""
