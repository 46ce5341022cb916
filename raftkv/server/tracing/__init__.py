"""Spans of requests, from the client through the leader to apply, for an OpenTelemetry collector.

::

    etcdserverpb.KV/Put                 the call, on the member that received it; its parent is the client's span
      raftkv.check                      until the request is queued: parsed, admitted, allowed
      raftkv.propose                    until it is appended to the log; on a follower, until it is forwarded
      raftkv.forward                    on a follower: from forwarding until its entry arrives
        raftkv.Peer/Propose             the leader's part, on the leader: propose, wal.sync, replicate
      raftkv.wal.sync                   until this member's own log has synced it
      raftkv.replicate                  until it is known to be committed
      raftkv.apply                      until it is applied here
      raftkv.respond                    until the answer is handed to the connection

Owns the choice of traced calls (``assembly``), the times of their stages (``stages``), the contexts sent between
members (``peers``) and the thread that sends spans to the collector (``exporter``). ``recording`` is the record of one
traced request.

Laws:

- Without ``--enable-distributed-tracing`` nothing of this package is imported, no handler is wrapped, and the cost for
  the node is one test for None.
- A request that is not sampled costs one look at its headers. A sampled one also costs a few time stamps on the loop;
  a thread makes and sends the spans. Nothing ever waits for a collector: if the queue is full, spans are dropped and
  counted.
- What is applied never depends on tracing: no trace context is in an entry. Between members, contexts travel beside the
  messages of a batch; a member without tracing skips them.
- A span contains no key, no value and no user name.
- The node's turns run in their own context, so that no effect of one request is recorded for another.

Leaves out: client spans (``raftkv.client.rpc.core``), metrics.
"""
