"""The Maintenance service of etcd, and the quotas of raftkv's Admin service.

Owns how clients ask for what looks after a member and its cluster. ``replica.maintenance`` does the work.

    service            Status, Alarm, Hash, HashKV, Defragment, MoveLeader, Downgrade
    snapshot           Snapshot: the state of this member as a file of etcd, made by a process beside it
    quotas             quotas of prefixes: QuotaSet, QuotaRemove, QuotaList

Laws:

- Codes and texts are etcd's; MoveLeader and Defragment answer without a header, as there.
- Changes of the cluster's state go through the log and are checked while they are applied (``raftkv.apply``).
"""
