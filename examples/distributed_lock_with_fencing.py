"""Why a lock needs a fence: a holder that lost its lock without noticing must not write.

A lock is held by a lease, and a lease ends when its holder does not answer in time: a long garbage collection, a laptop
that slept, a cut network. The holder finds out later than others get the lock. Only the store can keep such a late
writer out, by comparing the fencing token: ``fence=lock`` does that within the write.
"""

from __future__ import annotations

import raftkv

with raftkv.local() as cluster, cluster.connect() as ours, cluster.connect() as theirs:
    lock = ours.lock("locks/report", ttl=10).acquire()
    ours.put("report", "ours, first half", fence=lock)
    print("we hold it, token", "> 0" if lock.fence else "0")

    # The cluster gives up our lease, as it does with a holder that is silent for too long. We have not noticed yet.
    theirs.revoke(lock.lease.id)
    with theirs.lock("locks/report", ttl=10) as other:
        theirs.put("report", "theirs", fence=other)
        print("they hold it, token is larger:", other.fence > lock.fence)
        try:
            ours.put("report", "ours, second half", fence=lock)
        except (raftkv.LockLost, raftkv.LeaseLost) as error:
            print("our late write was refused:", type(error).__name__, "definite:", error.definite)

    item = theirs.get("report")
    assert item is not None
    print("what is stored:", item.text)
