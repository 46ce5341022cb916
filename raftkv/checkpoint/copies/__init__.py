"""Where else than in files the bytes of checkpoints are: copies in the memory of nodes, and the catalogue of all.

::

    catalogue   which copies there are, the nearest first; which nodes keep some, and which of them to choose
    holder      a node's memory: takes copies, lends them, and lets them go when a later checkpoint is committed
    transfer    bytes between a program and a holder, over TCP

Invariants

1. The record of a copy is a claim of its holder. Bytes count only if they have the digest that a rank prepared for the
   attempt that was committed: the reader compares it, each time, before the first use.
2. The key of a copy is leased by its holder: it is gone within the TTL of the holder's death.
3. A record speaks for its own key; an address in it is only ever connected to. A reader allocates what the committed
   list of files says, within its own limit, and never what a record of a copy or an answer says.
4. A holder answers only those who know its token, which is in its record, and takes no more than its limit.
5. A checkpoint in memory (``keys.MEMORY``) is committed in the same two phases as files are, if a copy of each file is
   there; it replaces the one before it. It is the latest of its own kind alone.

Leaves out tensors (``raftkv.torch.memory``), and who runs a holder (``raftkv.training``).
"""
