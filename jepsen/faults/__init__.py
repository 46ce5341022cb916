"""Faults of members and of the network, and their schedule from a seed.

Owns what goes wrong in a run, and when:

    nemesis      kill, pause, freeze, wipe; the schedule; inject -> hold -> heal -> the cluster must work again
    partitions   cut, offline, deaf, mute, bridge, slow, thin, reset: what each cuts and delays
    network      the relays that cut and delay, between members and between them and clients
    full_disks   full: disks without room
    bad_disks    power, liar, failing, erring, stalling, rewind: disks that lose, lie, fail, wait and go back in time
    power        what a loss of power takes back, by the log of ``disk_shim.c``, which is preloaded into members
    disks        a small disk for each member
    clocks       ahead, behind, fast, tardy: clocks that step, and back, or run at another rate
    members      who is a member: grow, replace, lose a disk, remove the leader, shrink
    failpoints   the points at which members die, and which of them a storm can reach

    seed -> schedule -> Step(fault, target, how long)
                           |
    cluster works --> inject --> hold until more writes are acknowledged --> heal --> acknowledged again? --> next
                                                                               |
                                                                               +-- not within 30 s: "not live"

Laws: the same seed gives the same faults in the same order; a fault comes when the cluster has acknowledged more
writes, never after a time; every fault but a change of members is undone, and a cluster that does not
work again after it is a violation; no fault leaves anything behind, and none needs privileges where users may make
namespaces and trace their own processes.

Example::

    steps = schedule(parse("kill,pause-leader", size=3), seed=7)
    await nemesis.carry_out(next(steps))
"""
