"""``raftkv doctor``: is this machine, this data directory and this cluster fit for work, and if not, what to do.

    raftkv doctor --config-file raftkv.yml          a member's own settings: directories, certificates, addresses
    raftkv doctor --data-dir /var/lib/raftkv        of a stopped member, or of one that runs
    raftkv doctor --endpoints 10.0.0.1:2379,...     a cluster

    finding       what one check has found: a level, a figure, an advice
    machine       clock, limits, memory, versions of what is installed
    disk          latency of the disk, space, file system, rights, locks
    certificates  when they end, whom they name, who may read the keys
    cluster       what members say of themselves: leader, alarms, quorum, lag, size, clocks, round trips
    judgement     what their answers mean (pure)
    command       flags, output, exit code

Laws: nothing is changed (the disk is tried in a file without a name, which is gone with the process), every check ends
within seconds, and one that cannot be made says why instead of failing. Each finding that is not well says in one line
what to do.
"""
