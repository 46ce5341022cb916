"""The command lines: ``raftkv`` (member, local cluster, daemons), ``raftkvctl`` (etcdctl's commands, bench, runs) and
``raftkvutl`` (etcdutl's commands: data directories and snapshot files).

    start: SIGINT during imports -> main, ctl.__main__ or utl.__main__ -> a command -> program.leave: code, last output

Laws: a failure that a user can cause is one line and a code (``program``); what a command does not need is not
imported. Example: ``raftkvctl put a 1``. Leaves out: everything that is not about words, output and exit codes.
"""
