"""The commands of raftkvutl: etcdutl's words, flags, output and exit codes.

    words -> tree: which command -> the command's module -> raftkv.offline -> output: one record in a format

Laws: a failure is one line on standard error and a code, never a traceback; nothing here talks to a member.
Example: ``raftkvutl hashkv default.etcd``. Read ``tree``, then any command. Leaves out: how flags are read
(``cli.pflag``), and the work itself (``raftkv.offline``).
"""
