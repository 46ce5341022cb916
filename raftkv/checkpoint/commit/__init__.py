"""How a checkpoint comes to exist: whole, or not at all.

::

    claim ----> attempt: head ----> rank 0, 1, 2, ... prepare ----> commit: record, latest (one txn, head deleted)
                    |                                                  |
                    +---- abort: deleting (head deleted) <-------------+  or the next generation takes it over

    claim        the right to write: every write of a generation stands under its fence; waits end with the claim
    attempt      one try to save one checkpoint: begin, join, prepare, commit, abort, takeover
    summary      what goes with every commit and later metric: ``latest``, and the index of metrics
    manifest     the list of all files, written beside the bytes before the commit

Invariants

1. A record exists only if every rank has prepared, and a rank prepares only durable files.
2. One txn exchanges the head of an attempt for its record, so a head exists exactly while its attempt is undecided.
3. ``latest`` moves only upwards, and only to a step whose record is written in the same txn.
4. All writes stand under the fence of their generation. The present generation commits or deletes the parts that a dead
   generation prepared, and only one of both: each takes the head away.
5. No two attempts write bytes below the same directory, and none begins twice: ``begun`` is written with each head.
6. A late copy of a txn changes nothing, however much later it arrives.

Leaves out the bytes (``checkpoint.storage``), and how long a checkpoint stays (``checkpoint.retention``).
"""
