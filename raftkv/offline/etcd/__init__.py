"""Snapshot files of etcd: the state of a member in the form that etcd's own tools read, and the way back.

    the database of a member  --contents-->  buckets of etcd  --storage.bolt-->  FILE  (database, SHA-256)
    a data directory          <--restore---  buckets of etcd  <--storage.bolt--  FILE, also one of etcd 3.4 to 3.6

``records`` has each small record both ways. Revisions need no translation: ``storage`` keeps etcd's keys and
etcd's bytes, and only puts a checksum before them.

Laws:

- Nothing is lost on the way there and back: keys, revisions, versions, leases, users and roles, the compacted revision,
  alarms. Members are those of the new cluster, as with etcd.
- A file is read as if an enemy had written it: what is wrong is one line (``StorageError``).
- A data directory gets its name when it is whole and durable.

Leaves out: the stream to a client (``server.maintenance.snapshot``), words and exit codes (``cli.utl``).
"""
