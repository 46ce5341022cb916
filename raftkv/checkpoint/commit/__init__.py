"""Creating a checkpoint atomically: complete, or not at all.

::

    claim ----> attempt: head ----> rank 0, 1, 2, ... prepare ----> commit: record, latest (one txn, head deleted)
                    |                                                  |
                    +---- abort: deleting (head deleted) <-------------+  or the next generation takes it over

    claim        the right to write: every write of a generation carries its fence; waits end with the claim
    attempt      one try to save one checkpoint: begin, join, prepare, commit, abort, takeover
    summary      keys written with every commit and metric: ``latest``, and the index of metrics
    manifest     the list of all files, written beside them before the commit

Invariants

1. A record exists only if every rank has prepared, and a rank prepares only durable files.
2. One txn replaces the head of an attempt by its record, so a head exists exactly while its attempt is open.
3. ``latest`` only increases, and only to a step whose record is written in the same txn.
4. All writes carry the fence of their generation. The current generation either commits or aborts what a dead
   generation prepared; both delete the head, so only one can happen.
5. No two attempts write files below the same directory, and no attempt begins twice: ``begun`` is written with each
   head.
6. A delayed copy of a txn changes nothing, no matter when it arrives.

Not here: the files (``checkpoint.storage``), and how long a checkpoint is kept (``checkpoint.retention``).
"""
