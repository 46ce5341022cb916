"""``raftkv backup``: snapshots of a cluster, each verified by restoring it, at any URL that fsspec knows.

    member --snapshot--> local file --upload--> NAME.db.part --read back, restored, hashed--> NAME.db --> NAME.json

    command   flags, the schedule, what is printed, the exit codes; which member is asked, and the check of its file
    place     the URL: temporary names, final names, errors in one line; what is known of each backup

Laws: a backup exists when its manifest does, and that is written last; so a backup that was killed at any moment is
none. What was uploaded is what is verified, by the hash that a member gives for that revision. The newest verified
backup is never deleted. A comparison that could not be made is a failure.

Example: ``raftkv backup file:///var/backups/raftkv --every 1h --keep 24 --endpoints a:2379,b:2379,c:2379``.
Leaves out: the log archive (``--wal-archive-dir`` of a member), which fills the time between two backups.
"""
