"""The audit log: who asked this member for what, and what came of it, one line of JSON for each request.

Owns the way of a line from a call that ends to a file. Nothing here takes part in serving:

    handler -> ``calls`` (around all handlers, outside of the guard of rights)     on the loop, when the call ends
            -> ``trail`` (a queue, bounded in bytes; full: new lines are dropped, and counted)
            -> a thread: ``lines`` (what a line says) -> a file, standard output or error

::

    {"time":"2026-11-23T01:02:03.456789Z","member":"m1","event":"call","remote":"10.0.0.7:4242","user":"alice",
     "method":"etcdserverpb.KV/Put","request":{"key":"job/1"},"outcome":"OK","revision":7,"duration_ms":1.2}

Laws:

- With the log off no handler is wrapped. With it on, the loop hands over a tuple and goes on.
- A line never has a value, a password or a token: of a request only fields in ``lines.SHOWN`` are looked at.
- A request that was refused for want of a right or a login is in the log at every level.
- A full disk does not stop the member: lines wait, up to ``trail.WAITING_BYTES_MAX``, then they are dropped, counted.
- Every line is written before the member has stopped; one that is killed loses those of the last 0.05 s.

Example::

    trail = AuditTrail(AuditFile("audit.log"), member="m1")
    calls = AuditCalls(trail, Level.WRITES)
    server = Server(limits, calls.http(handler), around=(calls.around, guard.around))
    ...
    await asyncio.to_thread(trail.close)

Leaves out: who may do what (``server.auth``), the log of the member itself (``server.logs``).
"""
