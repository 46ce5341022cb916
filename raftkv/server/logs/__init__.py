"""The member's log: one line an event, JSON as etcd writes it or plain for people, to streams and files.

::

    any thread -> handler (a queue of bytes) -> a thread for each output -> files (rotated by size and age) or a stream
    logs.outputs.configure(config)
    ...
    logs.outputs.close()

Owns where lines go (``outputs``), the queue (``handler``), files and their rotation as lumberjack does it (``files``).

Laws:

- A line waits in memory for its writing, and its caller waits too: all together never longer than ``handler.WAIT_S``
  in a second, and not at all while an output is behind. So a disk or a reader that stands still or is slow does not
  hold the loop, and otherwise every line is written before the member goes on: one that is killed has lost none.
- A full disk does not stop the member: lines wait, ``handler.WAITING_BYTES_MAX`` at most; then they are dropped, and a
  line in their place says how many.
- One place in the sources writes ``outputs.BURST`` lines at once, and one a second after that: the next line says how
  many were left out. So other machines cannot fill the log.
- Lines are written whole and in order. A file that was moved or deleted is opened anew, so ``logrotate`` needs no
  signal; one that was truncated (``copytruncate``) goes on at its new end.

Leaves out: who asked for what (``server.audit``).
"""
