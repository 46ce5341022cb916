"""The daemons beside a cluster: the TCPStore gateway for torch, the lighthouse for torchft.

``daemon`` is what both do alike: flags, the wait for the cluster, signals. Laws: a daemon keeps nothing on its own
disk; one that ends can be replaced by another. Example: ``raftkv tcpstore-gateway --endpoints 127.0.0.1:2379``. Leaves
out: the protocols (``training.tcpstore``, ``integrations.torchft``).
"""
