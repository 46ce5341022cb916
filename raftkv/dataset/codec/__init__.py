"""Chunks and index nodes as bytes.

    blob     compressed bytes under their digest: sealed by a publisher, opened by a reader that trusts nobody
    chunk    entries by columns
    node     an index node: digests, first paths and counts of what is below

Invariant: nothing that a reader is given, whatever its bytes, makes it use more memory than ``blob.RAW_BYTES_MAX`` and
some, or fails otherwise than with ``ChunkCorrupted``.
"""
