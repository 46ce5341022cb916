"""Engines: make batches of changes durable. One protocol, one engine on LMDB, and other engines in the tests.

This package manages the database file of a member and the thread that commits to it. ``base`` defines what the store
needs from an engine; one test suite checks all engines.

    owner's thread                              writer's thread

    batch = WriteBatch()
    writer.submit(commit batch, done)  ------>  backend.commit(batch)      one LMDB transaction, synced
    ... continues, reads its own writes         |
    done(None)  <------- notify ----------------+
    backend.begin_read()                        a state that includes the batch

Invariants:

- A batch is durable as a whole, or nothing of it is visible.
- A read transaction sees one commit; later commits are not visible. It never blocks, and is never blocked.
- After a full map (``MapFullError``) or disk (``SpaceError``) the engine is still usable, and the batch may be retried;
  after any other failure of a commit the engine is unusable.
- One thread at a time commits; reads may begin on any thread.

Example::

    backend = LMDBBackend(Path("db"))
    batch = WriteBatch()
    batch.values[schema.LEASE, b"7"] = b"..."
    backend.commit(batch)
    with closing(backend.begin_read()) as read:
        read.get(schema.LEASE, b"7")

Not here: the contents of the buckets (``storage/schema``), checksums (``storage/revision``), when to commit
(``storage/overlay``).
"""
