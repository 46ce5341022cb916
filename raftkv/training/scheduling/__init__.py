"""How runs share machines: who of a cluster may run on which slots, and which hosts are left out for a while.

::

    admission = ClusterAdmission(control, "gpu", weight=2)
    grant = await admission.request("job", candidates, min_nodes=2, max_nodes=4)
    admission.reason                              # number 2 in line for slots that bert-large holds

    admission  the ledger, one claim a run with its granted nodes; and the rule, pure: all or nothing, fair shares, no
               run waits for ever, no grant is revoked
    ledger     the ledger as one run uses it: compare and set, and a call back when the answer may change; and as
               ``raftkvctl run queue`` shows it
    denylist   hosts that keep breaking runs: strikes and denials, timed by leases

Invariants:

1. Slots are granted in one txn on the condition that the ledger and the hosts' declarations are as read: two runs are
   never granted the same slot.
2. A run waits with nothing in its hands, so two runs never wait for each other.
3. Every change of the ledger grants, in the same write, what has become free, to all runs alike: no process has to be
   there for it.
4. A run without nodes is dropped only in a txn on the condition that it has none.

Leaves out how a node that lost its slots ends its workers (``rendezvous``).
"""
