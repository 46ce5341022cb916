"""``raftkv doctor``: checks of this machine, a data directory and a cluster, each with an advice.

    raftkv doctor --config-file raftkv.yml          a member's own settings: directories, certificates, addresses
    raftkv doctor --data-dir /var/lib/raftkv        of a stopped member, or of one that runs
    raftkv doctor --endpoints 10.0.0.1:2379,...     a cluster

    machine    clock, limits, memory, installed versions; latency, space, file system, rights and locks of the disk
    judgement  what a check has found, and what the answers of members mean (pure)
    command    flags, output, exit code; checks of certificates; the questions to the members

Laws: the doctor changes nothing (it measures the disk in a file without a name, which goes with the process). Every
check ends within seconds; one that cannot be made is skipped, with the reason. Each warning and each failure says in
one line what to do.
"""
