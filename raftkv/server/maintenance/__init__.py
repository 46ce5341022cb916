"""The Maintenance service of etcd, and the quotas of raftkv's Admin service.

Owns the requests of clients that look after a member and its cluster. ``replica.maintenance`` does the work.

    service            Status, Alarm, Hash, HashKV, Defragment, MoveLeader, Downgrade
    snapshot           Snapshot: the state of this member as a file of etcd, made by a child process
    quotas             quotas of key prefixes: QuotaSet, QuotaRemove, QuotaList

Laws:

- Codes and texts are etcd's. As in etcd, MoveLeader and Defragment answer without a header.
- Changes of the cluster's state go through the log, and are checked when they are applied (``raftkv.apply``).
"""
