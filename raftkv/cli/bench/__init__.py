"""``raftkvctl bench``: how many calls, events, leases and locks a cluster serves, and how long each takes.

    command, check -> Bench: members, processes -> load: the clients of each -> result

Laws:

- The clock begins when all connections are open, and requests are made before they are sent.
- Latency is from sending to answer, of every call.
- Ctrl-C prints what was measured until then.

Example: ``raftkvctl bench put --total 100000 --clients 100``. Read ``load``, then ``command``.
Leaves out: comparisons with etcd, which ``bench/`` makes.
"""
