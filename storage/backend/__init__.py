"""Engines: where batches of changes become durable. One protocol, an engine on LMDB, and others in the tests.

Owns the database file of a member, and the thread that commits to it. ``base`` says what the store asks of an engine;
one test suite holds all engines to it.

    owner's thread                              writer's thread

    batch = WriteBatch()
    writer.submit(commit batch, done)  ------>  backend.commit(batch)      one LMDB transaction, synced
    ... goes on, reads what it wrote            |
    done(None)  <------- notify ----------------+
    backend.begin_read()                        a state with the batch in it

Laws:

- A batch is durable as a whole, or nothing of it is visible.
- A read transaction sees one commit; later commits do not show. It never blocks, and is never blocked.
- A full map (``MapFullError``) or disk (``SpaceError``) leaves the engine good, and the batch may be tried again; after
  any other failure of a commit the engine is of no more use.
- One thread at a time commits; reads may be begun on any thread.

Example::

    backend = LMDBBackend(Path("db"))
    batch = WriteBatch()
    batch.values[schema.LEASE, b"7"] = b"..."
    backend.commit(batch)
    with closing(backend.begin_read()) as read:
        read.get(schema.LEASE, b"7")

Left out: what is in the buckets (``storage/schema``), checksums (``storage/revision``), when to commit
(``storage/overlay``).
"""
