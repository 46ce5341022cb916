"""Durable state of a member: the write-ahead log, and the MVCC store with its key index and its database.

Imported as ``raftkv.storage``; synchronous; independent of asyncio, RPC and the server. Its files:

    DATA/member/wal/<sequence>-<first index>.wal    the Raft log                         storage/wal
    DATA/member/snap/db                             the state, about 100 ms behind       storage/backend
    DATA/member/snap/applied                        how far the log was applied          applied_mark.py

    committed entries                                               reads at any revision
          |                                                                   ^
          v                                                                   |
    mvcc.Store, mvcc.WriteTxn                                      mvcc_range.Reader, selection
          |                                                                   |
          +---> index.Index        key -> revisions     (KeyIndex, revision) <--+
          |                                                                   |
          +---> overlay.Overlay    revision -> record   (key_value, revision) <-+
                      |
                      | batches, on another thread
                      v
                backend            LMDB; compaction, hash, snapshot and restore work on its contents

Invariants:

- Every acknowledged write is durable: the log is synced before a client or another member receives the acknowledgement.
  Each log entry is replayed exactly once, because the database stores the index of the last applied entry in the same
  transaction as the effects of that entry (etcd issue 13766).
- The revision grows by one with each transaction that changes something and never goes back. The same entries give the
  same revisions, records and hashes on every member.
- Every byte read from a disk is checked: the log by a chain of CRC32C, each record by a checksum that covers its
  revision. Damage is an error, and is never repaired by guessing (``replica/maintenance/damage`` reacts to it).
- After a failed write or sync, the object that wrote is unusable. The only exception is a full disk: the write is
  retried.
- No client request blocks the owner thread for more than a few milliseconds: long reads, deletions, compactions and
  snapshot installations can run in steps, with other work between the steps.

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
