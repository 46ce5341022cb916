"""The words of groups of commands of ``raftkvctl``: names, flags, help and examples.

    checkpoints   ``raftkvctl checkpoint``; what its commands do is in ``cli.checkpoints``

The tree of all commands (``cli.ctl.tree``) imports these, so they must import nothing that talks to a cluster: a
command that only prints its help waits for none of that.
"""
