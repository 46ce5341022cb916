"""The commands of raftkvutl, with etcdutl's words, flags, output and exit codes.

    words -> tree: which command -> the command's module -> raftkv.offline -> output: one record in a format

Invariants: a failure is one line on standard error and an exit code, never a traceback; no command talks to a member.
Example: ``raftkvutl hashkv default.etcd``. Read ``tree``, then any command. Flags are parsed in ``cli.pflag``; the work
is done by ``raftkv.offline``.
"""
