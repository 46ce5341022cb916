"""The command lines: ``raftkv`` (member, local cluster, daemons) and ``raftkvctl`` (etcdctl's commands, bench, runs).

    start: SIGINT during imports -> main / ctl.__main__ -> a command -> program.leave: exit code, last output

Laws: a failure that a user can cause is one line and a code (``exits``); what a command does not need is not imported.
Example: ``raftkvctl put a 1``. Leaves out: everything that is not about words, output and exit codes.
"""
