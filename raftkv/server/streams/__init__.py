"""The gRPC services whose calls last: Lease (with its stream of keep-alives) and Watch.

Owns the way of their requests through this member: parsed, checked, counted in the share of their identity, and handed
to the parts of the replica that do the work (``replica.lease``, ``replica.watch``). A stream ends when its client
leaves, when its right ends (``server.auth.guard``), or, if it insists on a leader, when there is none.

    lease          grant, revoke, time to live, leases; what other members may ask of the leader
    keep_alives    one callback a message, no task; all answers of a turn leave in one write
    watch          one stream of requests in, one of responses out; progress notifications
"""
