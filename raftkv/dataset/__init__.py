"""The manifest cache: which files a dataset has, known to every rank without a server that keeps state for each file.

::

    data = raftkv.dataset.Dataset(kv, "imagenet", directory="/dev/shm/manifests")
    data.publish(Entry(path, size) for path, size in sorted(files))
    files = data.next_pass()                       # pins the newest version
    files.lookup("train/n01440764/10026.jpg"), files[5], len(files)
    for entry in files: ...

A manifest is cut into chunks of thousands of entries, each stored under the digest of its bytes. A chunk never changes,
so a copy of one is never wrong, its end concerns no other program, and the store keeps one watch for each client:
that of the head. Publishing writes the chunks that are new, and then one key.

    entry       what is known of a file, and what is refused        codec      chunks and index nodes as bytes
    keys        names, layout and values of keys                    tree       how entries become chunks and an index
    publish     the way of a new version into the store             collect    what nothing needs any more
    source      chunks out of the store, and the head               cache      copies in memory, and of a whole machine
    snapshot    one version, read        dataset    all of it       shuffle    orders that keep to few chunks at a time

It is a client of the store like any other, so it runs on raftkv and on etcd. A name is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from raftkv.dataset.dataset import Dataset as Dataset
    from raftkv.dataset.dataset import Snapshot as Snapshot
    from raftkv.dataset.entry import Entry as Entry
    from raftkv.dataset.shuffle import ChunkOrder as ChunkOrder
    from raftkv.dataset.shuffle import Permutation as Permutation

_PLACES: Final = {
    "ChunkOrder": "shuffle",
    "Dataset": "dataset",
    "Entry": "entry",
    "Permutation": "shuffle",
    "Snapshot": "dataset",
}

__all__ = ["ChunkOrder", "Dataset", "Entry", "Permutation", "Snapshot"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"raftkv.dataset.{_PLACES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
