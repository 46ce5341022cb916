"""The member's log: one line per event, as etcd's JSON or as plain text, to streams and files.

::

    any thread -> handler (a queue of bytes) -> a thread for each output -> files (rotated by size and age) or a stream
    logs.outputs.configure(config)
    ...
    logs.outputs.close()

Owns where lines go (``outputs``), the queue (``handler``), files and their rotation as lumberjack does it (``files``).

Laws:

- A line waits in memory to be written, and its caller waits too, but all callers together at most ``handler.WAIT_S``
  per second, and not at all while an output is behind. So a slow or blocked disk or reader does not hold the loop. In
  all other cases a line is written before the member continues, so a killed member has lost none.
- A full disk does not stop the member: up to ``handler.WAITING_BYTES_MAX`` of lines wait; then lines are dropped, and
  one line says how many.
- One place in the source may write ``outputs.BURST`` lines at once, then one a second; its next line says how many were
  left out. So other machines cannot fill the log.
- Lines are written whole and in order. A file that was moved or deleted is reopened, so ``logrotate`` needs no signal.
  Writing to a truncated file (``copytruncate``) continues at its new end.

Leaves out: the record of requests (``server.audit``).
"""
