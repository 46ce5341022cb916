"""``raftkvctl checkpoint``: the registry of checkpoints on the command line.

    finding   list, show, latest, best, runs, lineage   watching  watch
    contents  verify                                    keeping   pin, unpin, tag, untag, gc
    moving    export, import, copy
    view      tables, lines and JSON                    which     how a checkpoint is named
    frame     what every command begins with: arguments, the way to the registry, failures

What the registry does is in ``raftkv.checkpoint``; words, flags, help and examples are in ``cli.words.checkpoints``.
"""
