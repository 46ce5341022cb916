"""Checkpoints that other tools have left in directories, brought into the registry.

::

    for done in await import_directory(registry, "/shared/old-job/output"):
        print(done.step, done.action, done.reason)          # or json.dumps(done.plain())

    importing    what is in a directory, registered oldest first; what is there already is skipped; ``detect``: which
                 tool has written what, from the names of files alone
    source       the directory: its listing, and reads of bounded size
    formats      whether single files are whole: safetensors, torch's archives, JSON
    candidate    what may be a checkpoint; steps and numbers of shards in names
    trackers     files that name the newest checkpoint, compared with what is there
    trainer, lightning, distributed, deepspeed, megatron, orbax, tensorflow, weights
                 one tool each: ``detect`` and ``inspect``

Invariants

1. Nothing is unpickled, and no archive is unpacked: steps are read from names, from JSON, or from single numbers in
   the bytes of a pickle.
2. Reads of a file are bounded, also against its own header; a link out of the directory is refused.
3. A checkpoint is registered only if all files that its tool's own index or numbering names are there and not cut off.

Leaves out tools that name neither a step nor an index: give ``step`` and ``kind``.
"""
