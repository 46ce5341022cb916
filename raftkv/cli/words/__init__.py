"""The words of groups of commands: names, flags, help and examples.

    checkpoints   ``raftkvctl checkpoint``; what its commands do is in ``cli.checkpoints``
    users         ``raftkvctl auth``, ``user`` and ``role``; see ``cli.access``
    snapshots     ``snapshot status`` and ``restore`` of ``raftkvctl`` and of ``raftkvutl``; see ``cli.utl.snapshot``

The trees of all commands (``cli.ctl.tree``, ``cli.utl.tree``) import these, so they must import nothing that talks to a
cluster: a command that only prints its help waits for none of that.
"""
