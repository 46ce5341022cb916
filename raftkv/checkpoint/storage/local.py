"""Checkpoints as directories of this machine, for tools that read and write nothing else.

    take_in("/scratch/checkpoint-400", attempt.uri)      # moved there, or uploaded; durable and digested
    path = local_directory(checkpoint, "/scratch")       # verified: where it lies, or downloaded

Blocking. A directory that is taken in is renamed where that is possible: no byte is copied, and its old name is gone.
"""

from __future__ import annotations

import errno
import os
import shutil

from raftkv.checkpoint.commit.manifest import NAME as MANIFEST
from raftkv.checkpoint.errors import DigestMismatch, StorageError
from raftkv.checkpoint.records import Checkpoint, FileRecord
from raftkv.checkpoint.storage.place import Place
from raftkv.checkpoint.storage.rank_files import RankFiles
from raftkv.checkpoint.storage.transfer import copy_files, list_files
from raftkv.checkpoint.storage.verify import digest_of, load_manifest, verify
from raftkv.errors import ConfigError


def make_directory(uri: str) -> None:
    """Make the directory of an attempt, if it is one of this machine: programs open files in it by path.

    Raises:
        StorageError: it could not be made.
    """
    place = Place(uri)
    if place.is_local:
        with place.named("make"):
            os.makedirs(place.root, exist_ok=True)


def take_in(directory: str, uri: str) -> list[FileRecord]:
    """Move a local directory to where the bytes of an attempt lie; returns its files.

    Arguments:
        directory: it is gone afterwards.
        uri: of the directory of the attempt, which does not exist yet.

    Raises:
        StorageError: it could not be moved; what was copied so far is the attempt's, and ``directory`` is as it was.
    """
    place = Place(uri)
    with place.named("move the checkpoint to"):
        if place.is_local and _rename(directory, place.root):
            return digest_tree(uri)
        source = Place(directory)
        records = copy_files(source, list_files(source), place)
        shutil.rmtree(directory)
    return records


def _rename(directory: str, target: str) -> bool:
    """Rename a directory; False: the target is on another file system."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    try:
        os.rename(directory, target)
    except OSError as error:
        if error.errno == errno.EXDEV:
            return False
        raise
    return True


def digest_tree(uri: str) -> list[FileRecord]:
    """Make all files below a uri durable, and return them with their digests.

    Raises:
        StorageError: one could not be read or synced; the directory is gone, or nothing lies there.
    """
    files = RankFiles(uri)
    if files.place.is_local:
        with files.place.named("read"):  # a directory that has been deleted is no checkpoint without files
            names = sorted(os.listdir(files.place.root))
        for name in names:
            files.path(name)
    else:
        for found in files.place.list():
            digest = digest_of(files.place, found.name, on_bytes=lambda _: None)
            files.add(FileRecord(found.name, found.size_bytes, digest))
    records = files.finish()
    if not records:
        raise StorageError(f"there are no files below {files.place.uri}: write there before the save ends")
    return records


def local_directory(checkpoint: Checkpoint, directory: str = "") -> str:
    """Return a local directory that has the files of a checkpoint, which were compared with what was committed.

    Arguments:
        checkpoint: as a lookup returned it.
        directory: for checkpoints that do not lie on a local disk: below it is downloaded, once.

    Raises:
        DigestMismatch: a file is missing, or is not what was committed.
        ConfigError: it does not lie on a local disk, and there is no directory for it.
        StorageError: it could not be read or written.
    """
    place = Place(checkpoint.uri)
    if place.is_local:
        report = verify(checkpoint)
        wrong = [*report.missing, *report.wrong_size, *report.wrong_digest, *(name for name, _ in report.unreadable)]
        if wrong:
            raise DigestMismatch(checkpoint.uri, wrong[0], "is missing, or is not what was committed")
        return place.root
    if not directory:
        raise ConfigError(f"{checkpoint.uri} is no local disk; name a directory to download the checkpoint to")
    return _download(checkpoint, place, directory)


def _download(checkpoint: Checkpoint, place: Place, directory: str) -> str:
    target = os.path.join(os.path.abspath(directory), checkpoint.id.directory)
    if os.path.exists(os.path.join(target, MANIFEST)):
        return target  # renamed when it was whole
    manifest, partial = load_manifest(checkpoint), f"{target}.{os.getpid()}.part"
    local = Place(partial)
    copy_files(place, [file for _, file in manifest.files], local)
    local.write(MANIFEST, manifest.encoded)
    with local.named("rename"):
        try:
            os.rename(partial, target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            shutil.rmtree(partial, ignore_errors=True)  # another process of this machine was first
    return target
