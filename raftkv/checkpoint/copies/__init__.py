"""Copies of checkpoint files in the memory of nodes, and the catalogue of all copies.

::

    catalogue   existing copies, nearest first; nodes that hold copies, and the choice among them
    holder      a node's memory: accepts copies, serves them, and drops them when a later checkpoint is committed
    reading     a file from its nearest copy with the right digest
    transfer    bytes between a program and a holder, over TCP

Invariants

1. The record of a copy is not trusted. A reader accepts bytes only if they have the digest that a rank prepared for the
   committed attempt, and compares it each time before the first use.
2. The key of a copy is under its holder's lease, so it is deleted within the TTL of the holder's death.
3. A record is valid only for its own key; an address in it is only connected to. A reader allocates the size in the
   committed list of files, within its own limit, and never a size from a copy's record or an answer.
4. A holder answers only clients that present its token, which is in its record, and stores no more than its limit.
5. A checkpoint in memory (``keys.MEMORY``) is committed in the same two phases as files, if there is a copy of each
   file; it replaces the previous one. It is the latest only of its own kind.

Not here: tensors (``raftkv.torch.memory``), and the process that runs a holder (``raftkv.training``).
"""
