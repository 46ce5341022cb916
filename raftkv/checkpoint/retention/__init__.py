"""How long checkpoints stay, and how they go: never one that somebody needs.

    holds      why one must stay: pins of readers (leased), tags, children in other runs
    policy     which ones a retention policy would delete; pure
    collector  deletes them: ``deleting`` first, then the bytes, then the keys
    state      what a collector decides on
    ownership  whose bytes they are: which ones go with a checkpoint
    marks      which runs write to a place

Invariants

1. A record that is the latest of its kind, or has a hold, is not deleted: the txn that takes it away says so.
2. Bytes are deleted only after ``deleting`` says that they are to be; who is interrupted begins again there.
3. Bytes of a committed checkpoint are never deleted on account of an attempt.
"""
