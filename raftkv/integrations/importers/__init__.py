"""Imports existing checkpoints of other tools from directories into the registry.

::

    for done in await import_directory(registry, "/shared/old-job/output"):
        print(done.step, done.action, done.reason)          # or json.dumps(done.plain())

    importing    what is in a directory, registered oldest first; what is there already is skipped; ``detect``: which
                 tool has written what, from the names of files alone
    source       the directory: its listing, and reads of bounded size
    formats      completeness of single files: safetensors, torch's archives, JSON
    candidate    candidates for checkpoints; steps and shard numbers in names
    trainer, lightning, distributed, deepspeed, megatron, orbax, tensorflow, weights
                 one tool each: ``detect`` and ``inspect``

Invariants

1. Nothing is unpickled, and no archive is unpacked: steps are read from names, from JSON, or from single numbers in
   the bytes of a pickle.
2. Reads of a file are bounded, even if its header names a larger size; a link out of the directory is refused.
3. A checkpoint is registered only if all files that its tool's index or numbering names exist and are not truncated.

For tools that write neither a step nor an index, pass ``step`` and ``kind``.
"""
