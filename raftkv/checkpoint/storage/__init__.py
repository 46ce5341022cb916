"""Where the bytes of checkpoints are: any URL of fsspec, or a path.

    filesystems   a URL as a file system, its errors in one line
    place         files below a uri: written durably, read, listed, deleted
    writer        a file that is digested while it is written
    verify        what is there, beside what the manifest says; readers that check
    transfer      from one place to another, checked on the way

A file is durable when its writer is closed: on local disks it, and the directories that name it, are synced; object
stores say so themselves. Leaves out which bytes may be deleted (``checkpoint.retention``).
"""
