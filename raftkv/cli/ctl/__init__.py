"""The commands of raftkvctl: etcdctl's words, flags, output and exit codes.

    words -> tree: which command -> session: flags, ETCDCTL_*, client -> the command's module -> output: the printer

Laws:

- Output and exit codes are etcdctl 3.5's, byte for byte; tests run both programs side by side.
- A failure is one line on standard error and a code, never a traceback.
- No recipe of its own: ``watch``, ``lock``, ``elect``, ``lease keep-alive`` and ``make-mirror`` use the client library,
  which gives out the messages of members as they came.

Example::

    session = open_session(invocation)
    session.show("get", methods.RANGE, request)

Read ``tree``, ``session``, then any command. Leaves out: how flags are read (``cli.pflag``), how answers look
(``cli.printer``).
"""
