"""Spans of requests, from the client through the leader to applying, for an OpenTelemetry collector.

::

    etcdserverpb.KV/Put                 the call, on the member that was asked; its parent is the client's span
      raftkv.check                      until the request is in the queue: parsed, admitted, allowed
      raftkv.propose                    until it is appended to the log; on a follower, until it is passed on
      raftkv.forward                    on a follower: passed on, until its entry comes back
        raftkv.Peer/Propose             the leader's part, on the leader: propose, wal.sync, replicate
      raftkv.wal.sync                   until this member's own log has it for good
      raftkv.replicate                  until it is known to be committed
      raftkv.apply                      until it is applied here
      raftkv.respond                    until the answer is handed over

Owns which calls are traced (``assembly``), the moments of their way (``stages``), what travels between members
(``peers``) and the thread that sends spans to the collector (``exporter``). ``recording`` is what one traced request
has gathered.

Laws:

- Without ``--enable-distributed-tracing`` nothing of this package is imported, no handler is wrapped, and the node
  pays a test for None.
- Only a request that is sampled costs more than a look at its headers. On the loop it costs notes of times; spans are
  made and sent by a thread. Nothing ever waits for a collector: what finds the queue full is dropped, and counted.
- What is applied never depends on it: no context of a trace is in an entry. Between members contexts travel beside the
  messages of a batch; a member that does not trace skips them.
- A span holds no key, no value, no name of a user.
- The node's turns run in a context of their own, so that nothing one request causes counts as another's.

Leaves out: spans of clients (``raftkv.client.rpc.core``), metrics.
"""
