"""The commands of raftkvctl, with etcdctl's words, flags, output and exit codes.

    words -> tree: which command -> session: flags, ETCDCTL_*, client -> the command's module -> output: the printer

Invariants:

- Output and exit codes are etcdctl 3.5's, byte for byte, except for the differences that
  docs/reference/compatibility.md lists; tests run both programs side by side.
- A failure is one line on standard error and an exit code, never a traceback.
- No duplicate algorithms: ``watch``, ``lock``, ``elect``, ``lease keep-alive`` and ``make-mirror`` use the client
  library, which can return the unmodified messages of members.

Example::

    session = open_session(invocation)
    session.show("get", methods.RANGE, request)

Read ``tree``, ``session``, then any command. Flags are parsed in ``cli.pflag``, answers are printed by
``cli.printer``.
"""
