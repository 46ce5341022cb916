"""Snapshot files of etcd: export of a member's state in the form that etcd's own tools read, and restore.

    the database of a member  --contents-->  buckets of etcd  --storage.bolt-->  FILE  (database, SHA-256)
    a data directory          <--restore---  buckets of etcd  <--storage.bolt--  FILE, also one of etcd 3.4 to 3.6

``records`` converts each small record in both directions. Revisions need no conversion: ``storage`` keeps etcd's keys
and etcd's bytes, and only adds a checksum before them.

Invariants:

- Export and restore lose nothing: keys, revisions, versions, leases, users and roles, the compacted revision, alarms.
  Members are those of the new cluster, as with etcd.
- Files are untrusted input: an error in a file is one line (``StorageError``).
- A data directory gets its name when it is complete and durable.

Not here: the stream to a client (``server.maintenance.snapshot``), messages and exit codes (``cli.utl``).
"""
