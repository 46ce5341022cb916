"""``raftkvctl checkpoint``: the registry of checkpoints on the command line.

    finding   list, show, latest, best, runs, lineage, watch, verify
    keeping   pin, unpin, tag, untag, gc, export, import, copy
    frame     shared by all commands: arguments, how a checkpoint is named, the way to the registry, failures, tables

``raftkv.checkpoint`` is the registry itself; flags, help and examples are in ``cli.ctl.tree``.
"""
