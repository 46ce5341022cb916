"""How a checkpoint comes to exist: whole, or not at all.

::

    claim ----> attempt: head ----> rank 0, 1, 2, ... prepare ----> commit: record, latest (one txn, head deleted)
                    |                                                  |
                    +---- abort: deleting (head deleted) <-------------+  or the next generation takes it over

    claim        who may write: every write of a generation stands under its fence
    opening      how an attempt begins, how other ranks find it, which ones are undecided
    attempt      one try to save one checkpoint: prepare, commit, abort; what becomes of it
    summary      what goes with every commit: ``latest``, and the index of metrics
    metrics      metrics that come after the commit
    outcome      how ranks wait for the others
    manifest     the list of all files, written beside the bytes before the commit
    takeover     what a new generation makes of the attempts of dead ones

Invariants

1. A record exists only if every rank has prepared, and a rank prepares only what is durable.
2. ``record`` and the head of its attempt are exchanged in one txn; so a head is there exactly while nothing is decided.
3. ``latest`` moves only upwards, and only to a step whose record is written in the same txn.
4. All writes stand under the fence of their generation. What a dead generation prepared can only be committed or
   deleted by the present one, and only one of both: each takes the head away.
5. No two attempts write bytes below the same directory, and none begins twice: ``begun`` is written with each head.
6. A copy of a txn that arrives late changes nothing, however much later it comes.

Leaves out the bytes (``checkpoint.storage``), and how long a checkpoint stays (``checkpoint.retention``).
"""
