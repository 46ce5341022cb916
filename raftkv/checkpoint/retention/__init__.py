"""How long checkpoints stay, and how they go: a checkpoint that is held or newest stays.

    holds      the reasons to keep one: pins of readers (leased), tags, children in other runs
    policy     the decisions of a retention policy; pure
    collector  deletes: ``deleting`` first, then the bytes, then the keys
    ownership  which bytes go with a checkpoint, and which runs write to a place

Invariants

1. A record that is the latest of its kind, or has a hold, is not deleted: the txn that deletes it compares both.
2. Bytes are deleted only after ``deleting`` names them; an interrupted collection begins again there.
3. An attempt is no reason to delete bytes of a committed checkpoint.
"""
