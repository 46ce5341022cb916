"""Leases on one member: granted and revoked through the log, kept alive and ended by the leader.

This package decides *when* a lease ends. *Which* leases exist, their TTLs and their keys are agreed through the log
(``apply/leases``); no clock takes part in applying.

A lease of 10 s from grant to end, with a change of the leader in between; time runs to the right:

    log         GRANT      RENEW               RENEW                                 EXPIRE
    client        |----k-----k-----k-----k-------k--- dies                              |
    leader A      |   ends at: last keep-alive + TTL      | lost                        |
    leader B      |   records applied GRANT, RENEW        | leads; ends at: last RENEW  |
                  |                                       | that it applied + TTL + 0.5 s
    keys          attached ............................................................ deleted, in one revision

A keep-alive, and what its response waits for:

    request read -> KeepAliveStream.receive -> Lessor.renew_at_once
        this leader was confirmed recently, RENEW less than 0.5 s old  answered in this callback; sent with the cork
        RENEW too old                                                  joins the turn's RENEW, answered when applied
        leader not confirmed recently                                  a quorum confirms first
        another member leads                                           a batch per round trip to it (``on_leader``)
        the lease has expired                                          waits until it is gone, then TTL 0

Invariants:

- Never early: no lease ends before its TTL has passed since the last answered keep-alive was sent, through any change
  of leaders. Late by at most 0.5 s, a beat (0.1 s) and a commit.
- A leader answers from memory only if a RENEW of that lease was proposed less than 0.5 s before, and is applied. So a
  later leader knows at least the promised end.
- A leader proposes the end of a lease only when a quorum has answered it since the lease was found to have expired.
- EXPIRE and RENEW carry the leader's term and have no effect in another. An expiring lease is never renewed.
- The wall clock is never read. A pause of this process does not count against leases.

Example::

    lessor = Lessor(node, applier, ttl_min_s=2, channel=channel, cork=cork)
    replica.connect(graces=graces)                          # the lessor is notified of leaders and applied entries
    lessor.start()
    lease_id = await lessor.grant(60, caller, identity)

Modules: ``lessor`` (roles, timer), ``on_leader`` (queries to the leader), ``renewals`` (RENEW and EXPIRE), ``graces``
(lost connections), ``times`` (when leases end; pure).

Leaves out: the RPCs (``server.streams``), the lease itself (``apply/leases``), its keys (``storage/mvcc``).
"""
