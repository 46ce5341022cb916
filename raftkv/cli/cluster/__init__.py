"""``raftkv cluster``: a cluster of this machine in one terminal, kept in a directory.

``members`` are its processes (``client.local.process``), ``command`` watches them, ``view`` is the table. Laws: a
directory belongs to one cluster, and says to which; members are stopped before the program ends, and killed if they do
not stop. Example: ``raftkv cluster --size 3``. Leaves out: clusters that nobody keeps (``raftkv.local``).
"""
