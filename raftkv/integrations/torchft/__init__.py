"""torchft's lighthouse on raftkv: unmodified managers get their quorums from daemons of which any may die.

::

    raftkv torchft-lighthouse --listen a=127.0.0.1:29510 --endpoints h1:2379,h2:2379,h3:2379
    TORCHFT_LIGHTHOUSE=http://127.0.0.1:29510 python train.py

    lighthouse  the daemon: a listener for each job, calls of managers
    job         one job in one daemon: announces its replicas, decides if it is the arbiter, hands out answers
    rules       when replicas form a quorum: torchft's rule, pure; the replicas of one daemon; the keys of a job

Needs nothing beside a cluster: torchft is installed where its managers run (tested with torchft-nightly 2026.10.26).

Invariants:

1. No answer leaves before a read or a write of this decision has proved that its daemon is the arbiter and knows the
   last quorum.
2. A question is answered by one quorum only.
3. Errors of the store reach no replica.

Leaves out how replicas exchange their weights, which is torchft's.
"""
