"""How long checkpoints are kept, and how they are deleted; the latest and held checkpoints are always kept.

    holds      reasons to keep a checkpoint: pins of readers (leased), tags, children in other runs
    policy     the decisions of a retention policy; pure
    collector  deletes: first writes ``deleting``, then deletes the files, then the keys
    ownership  which files are deleted with a checkpoint, and which runs write to a place

Invariants

1. A record that is the latest of its kind, or has a hold, is not deleted: the deleting txn compares both.
2. Files are deleted only after ``deleting`` names them; the next collection continues an interrupted one from there.
3. Files of a committed checkpoint are never deleted because of an attempt.
"""
