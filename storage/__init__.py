"""Durable state of a member: the write-ahead log, and the MVCC store with its key index and its database.

Imported as ``raftkv.storage``; synchronous; knows nothing of asyncio, RPC or the server. Its files:

    DATA/member/wal/<sequence>-<first index>.wal    the log of Raft                      storage/wal
    DATA/member/snap/db                             the state, some 100 ms behind        storage/backend
    DATA/member/snap/applied                        how far the log was applied          applied_mark.py

    committed entries                                               reads at any revision
          |                                                                   ^
          v                                                                   |
    mvcc.Store, mvcc.WriteTxn                                      mvcc_range.Reader, selection
          |                                                                   |
          +---> index.Index        key -> revisions     (KeyIndex, revision) <--+
          |                                                                   |
          +---> overlay.Overlay    revision -> record   (key_value, record) <---+
                      |
                      | batches, on another thread
                      v
                backend            LMDB; compaction, hash, snapshot and restore work on what is there

Laws:

- Every write that was acknowledged, to a client or another member, is durable: the log is synced before. It is replayed
  exactly once, because the database carries the index of the last entry it contains in the transaction of its effects
  (etcd issue 13766).
- The revision grows by one with each transaction that changes something and never goes back; the same entries give the
  same revisions, records and hashes on every member.
- Every byte read from a disk is checked: the log by a chain of CRC32C, each record by a checksum that covers its
  revision. Damage stops the member; it is never repaired by guessing.
- A failed write or sync is final for the object it happened in; only a lack of space may be waited for.
- Nothing that clients ask for holds the owner longer than some milliseconds: long reads, deletions, compactions and
  installations of snapshots can be done in steps, with other work between.

Example::

    store = Store.open(LMDBBackend(path), ThreadWriter(loop.call_soon_threadsafe))
    txn = store.begin()
    txn.put(b"k", b"v")
    txn.end()                               # the store is at revision 2
    store.set_applied(index=7, term=1)      # entry 7 is in the state, and on disk with the next batch
    store.range(b"k").kvs

Reading order: ``revision``, ``index``, ``overlay``, ``mvcc``; then ``wal``.

Left out: what a request means (``raftkv.apply``), when to sync, commit, compact and release (``raftkv.replica.node``),
watchers, and leases but for the keys that are attached to them (``mvcc``).
"""

if __name__ != "raftkv.storage":
    raise ImportError("import this package as raftkv.storage, not as storage")
