"""Looking after a member and its cluster: status, alarms, hashes, snapshots, leadership, defragmentation, quotas.

Owns the Maintenance service of etcd and the quotas of raftkv's Admin service, and what a member does by itself to
notice damage. Each subject is a module; ``service`` puts those of etcd's service together.

    service            Status, Alarm, Hash, HashKV; registers the others
    defragmentation    Defragment: a compact copy takes the place of the database, online
    hashes             hashes of the history, for clients and other members; those of the last compactions
    comparison         what hashes of several members say: pure
    corruption         compares members at the start, while running and after compactions; raises the CORRUPT alarm
    snapshot           Snapshot: the state of this member as a file of etcd, made by a process beside it
    space              what happens when there is no room: copies are given up, the NOSPACE alarm is raised
    leadership         MoveLeader, asked of the leader
    quotas             quotas of prefixes: QuotaSet, QuotaRemove, QuotaList
    downgrade          Downgrade: which versions may be asked for, and the job in the log

Laws:

- Codes and texts are etcd's; MoveLeader and Defragment answer without a header, as there.
- Changes of the cluster's state go through the log and are checked while they are applied (``raftkv.apply``).
- Work on the database (hashes, copies) is done on threads; the loop only waits for it.

Example::

    defragmenter = Defragmenter(store, directory, on_fatal, histogram.observe)
    MaintenanceService(responder, store, quota_bytes, check_capable, defragmenter, hashes).register(server)

Leaves out: databases for other members (``replica.snapshots``), membership (``replica.membership``).
"""
