"""Manifests of datasets: the list of files, cached by every rank, without server state for each file.

::

    data = raftkv.dataset.Dataset(kv, "imagenet", directory="/dev/shm/manifests")
    data.publish(Entry(path, size) for path, size in sorted(files))
    files = data.next_pass()                       # pins the newest version
    files.lookup("train/n01440764/10026.jpg"), files[5], len(files)
    for entry in files: ...

A manifest is cut into chunks of thousands of entries, each stored under the digest of its bytes. A chunk never changes,
so a cached copy is always valid and can be dropped at any time, and the store keeps only one watch per client: that of
the head. Publishing writes the new chunks, and then one key.

    entry       the entry of a file, and its limits                 codec      chunks and index nodes as bytes
    keys        names, layout and values of keys                    tree       chunks and an index from entries
    publish     writes a new version; collects old versions         source     reads chunks and the head from the store
    cache       copies in memory and for a whole machine            shuffle    orders that need few chunks at a time
    dataset     ``Dataset``, and ``Snapshot``: one version

The package is an ordinary client of the store, so it runs on raftkv and on etcd. A name is imported when it is first
used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raftkv.lazy import attach

if TYPE_CHECKING:
    from raftkv.dataset.dataset import Dataset as Dataset
    from raftkv.dataset.dataset import Snapshot as Snapshot
    from raftkv.dataset.entry import Entry as Entry
    from raftkv.dataset.errors import ChunkCorrupted as ChunkCorrupted
    from raftkv.dataset.errors import DatasetError as DatasetError
    from raftkv.dataset.errors import DatasetNotFound as DatasetNotFound
    from raftkv.dataset.errors import InvalidEntry as InvalidEntry
    from raftkv.dataset.errors import PublishConflict as PublishConflict
    from raftkv.dataset.errors import StaleHead as StaleHead
    from raftkv.dataset.errors import VersionGone as VersionGone
    from raftkv.dataset.shuffle import ChunkOrder as ChunkOrder
    from raftkv.dataset.shuffle import Permutation as Permutation

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "dataset": "Dataset Snapshot",
        "entry": "Entry",
        "errors": "ChunkCorrupted DatasetError DatasetNotFound InvalidEntry PublishConflict StaleHead VersionGone",
        "shuffle": "ChunkOrder Permutation",
    },
)
