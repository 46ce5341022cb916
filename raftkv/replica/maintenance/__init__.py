"""Automatic maintenance of a replica: looks for damage, compares members, frees space.

This package does the work behind etcd's Maintenance service; ``server.maintenance`` handles its calls.

    damage             known damage and the member's reaction; the scrub that looks for damage
    hashes             hashes of the history, for clients and other members; the pure comparison of several members
    corruption         compares members at the start, while running and after compactions; raises the CORRUPT alarm
    defragmentation    replaces the database by a compact copy, online
    space              reactions to a full disk: cancel copies, raise the NOSPACE alarm

Work on the database (hashes, copies) runs on threads; the loop only waits for it.
"""
