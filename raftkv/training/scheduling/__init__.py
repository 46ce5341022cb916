"""How runs share machines: who of a cluster may run on which slots, and which hosts are left out for a while.

::

    admission = ClusterAdmission(control, "gpu", weight=2)
    grant = await admission.request("job", candidates, min_nodes=2, max_nodes=4)
    admission.reason                              # number 2 in line for slots that bert-large holds

    record     the ledger: one claim a run, with the nodes that it was granted; where it is kept
    admission  the rule, pure: all or nothing, fair shares, nobody is passed over for ever, nobody is driven out
    ledger     the ledger as one run uses it: compare and set, and a call back when the answer may change
    denylist   hosts that keep breaking runs: strikes and denials, timed by leases
    view       the cluster as people look at it (``raftkvctl run queue``)

Invariants:

1. Slots are granted in one txn on the condition that the ledger and the hosts' declarations are as read: two runs are
   never granted the same slot.
2. A run waits with nothing in its hands, so two runs never wait for each other.
3. Whoever changes the ledger hands out in the same write what has become free, to all runs alike: there is no process
   that could be missing.
4. A run without nodes is dropped only in a txn on the condition that it has none.

Leaves out how a node that lost its slots ends its workers (``rendezvous``).
"""
