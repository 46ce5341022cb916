"""Training runs on the command line: ``raftkvctl run exec``, ``list``, ``show``, ``timeline``, ``watch``.

``commands`` reads, ``facts`` is what was found, ``view`` prints it, ``exec`` runs workers of this node. Laws: what is
shown is of one revision; a record that is written again says nothing new. Example: ``raftkvctl run show job``.
Leaves out: how runs work (``raftkv.training``).
"""
