"""The command lines: ``raftkv`` (member, local cluster, daemons), ``raftkvctl`` (etcdctl's commands, bench, runs) and
``raftkvutl`` (etcdutl's commands: data directories and snapshot files).

    start: SIGINT during imports -> main, ctl.__main__ or utl.__main__ -> a command -> program.leave: code, last output

Invariants: a failure that a user can cause is reported as one line and an exit code (``program``); a command imports
only what it needs. Example: ``raftkvctl put a 1``. Only words, output and exit codes are handled here.
"""
