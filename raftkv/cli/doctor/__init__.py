"""``raftkv doctor``: checks of this machine, a data directory and a cluster, each with an advice.

    raftkv doctor --config-file raftkv.yml          a member's own settings: directories, certificates, addresses
    raftkv doctor --data-dir /var/lib/raftkv        of a stopped member, or of one that runs
    raftkv doctor --endpoints 10.0.0.1:2379,...     a cluster

    machine       clock, limits, memory, versions of what is installed
    disk          latency of the disk, space, file system, rights, locks
    certificates  when they end, whom they name, who may read the keys
    cluster       what members say of themselves: leader, alarms, quorum, lag, size, clocks, round trips
    judgement     what a check has found, and what the answers of members mean (pure)
    command       flags, output, exit code

Laws: the doctor changes nothing (it measures the disk in a file without a name, which goes with the process). Every
check ends within seconds; one that cannot be made is skipped, with the reason. Each warning and each failure says in
one line what to do.
"""
