"""torchft's lighthouse on raftkv: unmodified managers get quorums from replicated daemons, any of which may die.

::

    raftkv torchft-lighthouse --listen a=127.0.0.1:29510 --endpoints h1:2379,h2:2379,h3:2379
    TORCHFT_LIGHTHOUSE=http://127.0.0.1:29510 python train.py

    lighthouse  the daemon: a listener for each job, calls of managers
    job         one job in one daemon: announces its replicas, decides if it is the arbiter, answers managers
    rules       torchft's rule for quorums, pure; the replicas of one daemon; the keys of a job

Needs only a cluster; torchft is installed where its managers run (tested with torchft-nightly 2026.10.26).

Invariants:

1. No answer is sent before a read or write of this decision has proved that its daemon is the arbiter and knows the
   last quorum.
2. Each ask is answered by exactly one quorum.
3. Replicas never see errors of the store.

The exchange of weights between replicas is done by torchft.
"""
