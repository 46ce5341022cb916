"""What the registry of checkpoints costs, on three real members with fsync, raftkv beside etcd in one run.

    python -m bench.checkpoint.registry [--json] [--rows commit,watch,lookup]

    commit   many ranks prepare and one commits: seconds, and the size of the txn     bar: 0.5 s for 1,000 ranks
    watch    from a commit to a program that waits for it                             bar: 50 ms
    lookup   every question about 100,000 checkpoints of 100 runs                     bar: 5 ms

The bars are on raftkv alone and machine-checked: the exit code is 1 if one is missed. The members, and the load, share
the cores of one machine; the load average is printed beside the figures.
"""
