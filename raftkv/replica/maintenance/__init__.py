"""What a replica does by itself to stay whole: it looks for damage, compares members, makes room.

Owns the work behind etcd's Maintenance service; ``server.maintenance`` answers its calls.

    damage             known damage and what the member does about it; the scrub that looks for it
    hashes             hashes of the history, for clients and other members; the comparison of several members: pure
    corruption         compares members at the start, while running and after compactions; raises the CORRUPT alarm
    defragmentation    a compact copy takes the place of the database, online
    space              what happens when there is no room: copies are given up, the NOSPACE alarm is raised

Work on the database (hashes, copies) is done on threads; the loop only waits for it.
"""
