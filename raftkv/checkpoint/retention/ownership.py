"""Whose bytes they are: which ones may be deleted with a checkpoint.

- A directory that has the name of the attempt was made by it, for it alone: it is deleted whole.
- An existing directory that was registered in place belongs to whoever made it. It is left alone, unless it was handed
  over (``adopt(..., owned=True)``): then the files that its manifest lists are deleted, and nothing else.

What was handed over is noted in the metadata of the checkpoint.
"""

from __future__ import annotations

from typing import Final

from raftkv.checkpoint.commit.manifest import NAME as MANIFEST
from raftkv.checkpoint.commit.manifest import Manifest
from raftkv.checkpoint.keys import AttemptId
from raftkv.checkpoint.records import Checkpoint, Deleting
from raftkv.checkpoint.storage.place import Place
from raftkv.checkpoint.storage.verify import decode_manifest
from raftkv.client.control.records import RecordError

ADOPTED: Final = "raftkv.adopted"
"""Name in the metadata of a checkpoint that lies in a directory which was there before."""
OWNED: Final = "owned"
KEPT: Final = "kept"


def holds_whole_checkpoint(uri: str) -> bool:
    """Return whether all files are there that the manifest in a directory lists.

    No zombie leaves such a directory: the manifest is written when all files are there. If no key names it, the store
    is not the one that it was committed in, as after a restore from a backup.

    Raises:
        StorageError: the place cannot be read.
    """
    place = Place(uri)
    if not place.exists(MANIFEST):
        return False
    try:
        files = [file for _, file in Manifest.decode(place.read(MANIFEST)).files]
    except RecordError:
        return False
    there = {found.name: found.size_bytes for found in place.list()}
    return all(there.get(file.name) == file.size_bytes for file in files)


def deleting(checkpoint: Checkpoint, reason: str, now: float, collector: str) -> Deleting:
    """Return what to delete of a checkpoint that nobody can find any more.

    Arguments:
        checkpoint: which.
        reason: for people.
        now: the wall clock.
        collector: who deletes it.
    """
    handed_over = checkpoint.metadata.get(ADOPTED) == OWNED
    return Deleting(checkpoint.uri, reason, now, checkpoint.manifest if handed_over else "", collector)


def delete_bytes(gone: Deleting, attempt: AttemptId) -> bool:
    """Delete what is to be deleted, as far as it is there still; False: the bytes are not the registry's, and stay.

    Arguments:
        gone: which bytes.
        attempt: whose.

    Raises:
        StorageError: something could not be deleted; calling again goes on.
        DigestMismatch: the manifest of a directory that was handed over is another one: nothing was deleted.
    """
    is_own = gone.uri.rpartition("/")[2] == attempt.directory
    if not is_own and not gone.manifest:
        return False
    place = Place(gone.uri)
    if is_own:
        place.delete_tree()
        return True
    if place.exists(MANIFEST):
        for _, file in decode_manifest(gone.uri, place.read(MANIFEST), gone.manifest).files:
            place.delete(file.name)
        place.delete(MANIFEST)  # the last: until then it says what is left to delete
    place.delete_empty_directories()
    return True
