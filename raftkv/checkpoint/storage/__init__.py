"""The files of checkpoints, at any fsspec URL or path.

    filesystems   a URL as a file system, with one-line errors; ``raftkv backup`` uses it too
    place         files below a URI: written durably and digested, read, listed, deleted
    rank_files    the files that one rank adds to a checkpoint
    verify        compares files with the manifest; verifying readers
    transfer      verified copies between places; moving a directory in, downloading one

A file is durable when its writer is closed: on local disks the file and its parent directories are synced; object
stores guarantee it themselves. Which files may be deleted is decided in ``checkpoint.retention``.
"""
