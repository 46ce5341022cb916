"""Leases that this client keeps alive, sessions that get a new one after a loss.

    sent        k-----k-----k-----k--x        every third of the TTL; all leases of the client on one stream
    confirmed      ok    ok    ok             good until: when the confirmed keep-alive was *sent*, plus the TTL
    member      1     1     2                 a member that is silent until the next keep-alive is left for the next

Laws:

- A lease is relied on by this machine's monotonic clock, not by the cluster's word of a moment ago; time in which the
  machine slept counts (``lease_now``).
- It is lost when the cluster does not know it any more, or at that deadline; then blocks are interrupted, callbacks
  called, and calls with ``lease=`` refused.
- A patient lease leaves the deadline out: only the cluster ends it.

Example::

    async with kv.lease(ttl=10) as lease:
        await kv.put("workers/1", b"here", lease=lease)

Read ``lease``, then ``keeper``; its ``renewals`` keeps a lease of another client alive, and yields the answers.
"""
