"""Database files of bbolt, the engine of etcd: the format of etcd's snapshot files.

This package handles the file format; ``raftkv.offline.etcd`` handles what etcd stores in it. A file is written in one
pass from sorted items, and read in one pass; neither keeps more than a few pages in memory.

    layout = measure(buckets)                    first pass: the number of pages
    for piece in write(buckets, layout): ...     second pass, over the same items: the bytes of the file, in order

    with BoltFile(path) as file:                 refuses a damaged or foreign file with one line (``StorageError``)
        for name in file.buckets(): ...          in order
        for key, value in file.items(name): ...  in order

THE FORMAT, version 2, little-endian. A file is a sequence of pages of one size (the operating system's, 4096 here),
numbered from 0. A page that needs more than one is followed by ``overflow`` pages that belong to it::

    page         id u64, flags u16 (1 branch, 2 leaf, 4 meta, 16 freelist), count u16, overflow u32, then the content
    leaf         count elements: flags u32 (1: the value is a bucket), position u32, key size u32, value size u32;
                 then the bytes. A position counts from the start of its own element; the value follows its key.
    branch       count elements: position u32, key size u32, page u64; then the keys. A key is the first one below.
    freelist     count page numbers u64 (if count is ffff, the first u64 is the count): unused pages
    meta         pages 0 and 1: magic ed0cdaed u32, version u32, page size u32, flags u32, root bucket (16 bytes),
                 freelist page u64, number of pages u64, transaction u64, FNV-1a 64 of the bytes before u64.
                 The one with the newest transaction and a correct checksum counts.
    bucket       root page u64, sequence u64. If the root is 0, a leaf page follows inside the value ("inline").

The root bucket holds the named buckets. All keys of a page, and of all pages from left to right, ascend.

The writer's layout: pages 0 and 1 meta, page 2 an empty freelist, then the trees of the buckets from their leaves
up, full pages only, and the root bucket's tree last. The meta pages come first but refer to the last page, which is why
a file takes two passes; in exchange it can be sent while it is being made, without a copy on disk.
"""
