"""Horovod's HTTP rendezvous for a training run, served by the members themselves on their client ports.

::

    raftkv --horovod-run job ...                                   # each member
    HOROVOD_GLOO_RENDEZVOUS_ADDR=10.0.0.1 HOROVOD_GLOO_RENDEZVOUS_PORT=2379 python train.py

Horovod's workers know one address, of a server that may not die; here that address leads to any member. A member knows
nothing of runs: the command line hands it ``routes.extension(run)``, which answers Horovod's requests, passes on all
others, and reads and writes keys through the member's own ``LocalStore``.

Owns the paths (``routes``) and what lies behind them (``scopes``): tables of keys, each of one generation of the run.
Ranks come from ``rendezvous.ranks``, the one place where they are computed.

Invariants: a worker of an earlier generation sees and changes nothing of the present one; a read is confirmed with a
quorum; no request makes a member look at more than ``SCOPE_KEYS_MAX`` keys or ``SLOTS_MAX`` slots.

Leaves out: what workers put (bytes, also those that Horovod pickles), and who may use plain HTTP (``http.access``).
"""
