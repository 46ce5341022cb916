"""How runs share machines: which runs of a cluster may use which slots, and which hosts are denied for a while.

::

    admission = ClusterAdmission(control, "gpu", weight=2)
    granted = await admission.request("job", candidates, min_nodes=2, max_nodes=4)
    admission.reason                              # number 2 in line for slots that bert-large holds

    admission  the ledger, with one claim per run and its granted nodes; and the rule, pure: all or nothing, fair
               shares, no run waits for ever, no grant is revoked
    ledger     the ledger as one run uses it: compare and set, and a callback when the answer may change; and the view
               of ``raftkvctl run queue``
    denylist   hosts that keep causing faults: strikes and denials, timed by leases

Invariants:

1. Slots are granted in one txn on the condition that the ledger and the hosts' declarations are unchanged, so two runs
   are never granted the same slot.
2. A waiting run holds no slots, so two runs never wait for each other.
3. Every change of the ledger also grants free slots to all runs in the same write, so no scheduler process is needed.
4. A run without nodes is removed only in a txn with the condition that it has none.

Not here: how a node that lost its slots stops its workers (``rendezvous``).
"""
