"""The audit log: which user asked this member for what, with which outcome; one line of JSON per request.

Owns the path of a line from the end of a call to a file. Nothing here takes part in serving:

    handler -> ``calls`` (around all handlers, outside of the access guard)        on the loop, when the call ends
            -> ``trail`` (a queue, bounded in bytes; full: new lines are dropped, and counted)
            -> a thread: ``lines`` (content of a line) -> a file, standard output or standard error

::

    {"time":"2026-11-23T01:02:03.456789Z","member":"m1","event":"call","remote":"10.0.0.7:4242","user":"alice",
     "method":"etcdserverpb.KV/Put","request":{"key":"job/1"},"outcome":"OK","revision":7,"duration_ms":1.2}

Laws:

- While the log is off, no handler is wrapped. While it is on, the loop only queues a tuple.
- A line never contains a value, a password or a token: of a request only the fields in ``lines.SHOWN`` are read.
- A request refused for a missing right or a failed login is logged at every level.
- A full disk does not stop the member: up to ``trail.WAITING_BYTES_MAX`` of lines wait, then lines are dropped and
  counted.
- Every line is written before the member has stopped. A member that is killed loses the lines of the last 0.05 s.

Example::

    trail = AuditTrail(open_destination("audit.log", 0, 0), member="m1")
    calls = AuditCalls(trail, Level.WRITES)
    server = Server(limits, calls.http(handler), around=(calls.around, guard.around))
    ...
    await asyncio.to_thread(trail.close)

Leaves out: access rights (``server.auth``), the log of the member itself (``server.logs``).
"""
