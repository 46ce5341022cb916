"""Clusters on this machine: throwaway ones for programs and tests, and the launcher of a single member.

    program --pipe--> guard (process group) <- member 1, 2, 3     at its end the guard kills the group, removes the data

Laws:

- Nothing of a throwaway cluster is left behind, however the program goes.
- Only the process that made a cluster ends it; a forked child does not.
- ``process.ServerProcess`` is the only place that builds a member's command line, starts it and waits until it serves;
  ``raftkv cluster``, the tests and the benchmarks use it. The storms of ``jepsen`` keep their own, because they may
  import nothing of the system under test.

Example::

    with raftkv.local(size=3) as cluster, cluster.connect() as kv:
        cluster.members[0].kill()

Read ``cluster``, ``process``, then ``guard``.
"""
