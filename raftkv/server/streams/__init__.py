"""The gRPC services with long calls: Lease (with its keep-alive stream) and Watch.

Owns the path of their requests through this member: they are parsed, checked, counted in the share of their identity,
and passed to the parts of the replica that do the work (``replica.lease``, ``replica.watch``). A stream ends when its
client leaves, when its right ends (``server.auth.guard``), or, if the client requires a leader, when there is none.

    lease          grant, revoke, time to live, leases; also what other members may ask of the leader
    keep_alives    one callback per message, no task; all answers of a turn leave in one write
    watch          one stream of requests in, one of responses out; progress notifications
"""
