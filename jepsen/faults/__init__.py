"""Faults of members and of the network, and their schedule from a seed.

The faults of a run, and their schedule:

    nemesis      kill, pause, freeze, wipe; the schedule; inject -> hold -> heal -> the cluster must work again
    partitions   cut, offline, deaf, mute, bridge, slow, thin, reset: the cuts and delays of each
    network      the relays that cut and delay, between members and between them and clients
    full_disks   full: disks without free space
    bad_disks    power, liar, failing, erring, stalling, rewind: disks that lose, lie, fail, wait and go back in time
    power        the effect of a power loss, computed from the log of ``disk_shim.c``, which is preloaded into members
    disks        a small disk for each member
    clocks       ahead, behind, fast, tardy: clocks that step and return, or run at another rate
    members      membership changes: grow, replace, lose a disk, remove the leader, shrink
    failpoints   the points at which members die, and which of them a storm can reach

    seed -> schedule -> Step(fault, target, how long)
                           |
    cluster works --> inject --> hold until more writes are acknowledged --> heal --> acknowledged again? --> next
                                                                               |
                                                                               +-- not within 30 s: "not live"

Invariants: the same seed gives the same faults in the same order. A fault comes when the cluster has acknowledged more
writes, never after a time. Every fault except a membership change is undone, and a cluster that does not work again
afterwards is a violation. No fault leaves anything behind, and none needs privileges where users may create namespaces
and trace their own processes.

Example::

    steps = schedule(parse("kill,pause-leader", size=3), seed=7)
    await nemesis.carry_out(next(steps))
"""
