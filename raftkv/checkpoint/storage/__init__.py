"""The bytes of checkpoints: at any URL of fsspec, or a path.

    filesystems   a URL as a file system, its errors in one line; ``raftkv backup`` uses it too
    place         files below a uri: written durably and digested meanwhile, read, listed, deleted
    rank_files    the files that one rank adds to a checkpoint
    verify        compares files with the manifest; readers that check
    transfer      from one place to another, checked on the way; directories that move in, or are downloaded

A file is durable when its writer is closed: on local disks it, and the directories that name it, are synced; object
stores promise so themselves. Leaves out which bytes may be deleted (``checkpoint.retention``).
"""
