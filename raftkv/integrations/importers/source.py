"""The directory that is imported: its listing, and reads of bounded size, wherever fsspec reaches.

    source = Source("/shared/old-job/output")
    source.listing.files["checkpoint-100/trainer_state.json"]     # its size in bytes
    source.read_json("checkpoint-100/trainer_state.json")

Blocking: programs with an event loop call it on a thread. Leaves out writing: nothing below the directory is changed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import IO, Any, Final

from raftkv.checkpoint.commit.manifest import NAME as MANIFEST
from raftkv.checkpoint.commit.manifest import RECORD
from raftkv.checkpoint.errors import NotWhole
from raftkv.checkpoint.keys import check_file_name
from raftkv.checkpoint.storage.place import Found, Place
from raftkv.errors import ConfigError

FILES_MAX: Final = 200_000
"""Limit of one directory that is imported."""
JSON_MAX_BYTES: Final = 32 * 1024 * 1024
"""Limit of one file that is parsed; the logs that the HF Trainer keeps in its state grow with the run."""


@dataclass(frozen=True)
class Listing:
    """The files of a directory.

    Attributes:
        name: of the directory, its last part.
        files: name below it, with slashes, to size in bytes.
    """

    name: str
    files: Mapping[str, int]

    @cached_property
    def top(self) -> Mapping[str, int]:
        """The files that lie in the directory itself."""
        return {name: size for name, size in self.files.items() if "/" not in name}

    @cached_property
    def directories(self) -> list[str]:
        """All directories below it, parents first."""
        found = {name[:at] for name in self.files for at, char in enumerate(name) if char == "/"}
        return sorted(found, key=lambda path: (path.count("/"), path))


class Source:
    """A directory, or one file, that another tool has written.

    Arguments:
        uri: path or URL.

    Raises:
        ConfigError: fsspec is not installed, or knows no such URL, or nothing is there.
        NotWhole: a link leads out of the directory.
        StorageError: it could not be listed.
    """

    def __init__(self, uri: str) -> None:
        place = Place(uri)
        self.uri = place.uri
        with place.named("list"):
            if not place.fs.exists(place.root):
                raise ConfigError(f"there is nothing at {self.uri}")
            is_file = bool(place.fs.isfile(place.root))
        if is_file:
            self.uri, _, only = self.uri.rpartition("/")
            place = Place(self.uri)
            found = {only: int(place.fs.size(place.path(only)))}
        else:
            usable = [file for file in place.list() if self._is_usable(place, file)]
            found = {check_file_name(file.name): file.size_bytes for file in usable}
        if len(found) > FILES_MAX:
            raise ConfigError(f"{uri} has {len(found)} files: at most {FILES_MAX}; import its directories one by one")
        self._place = place
        self.listing = Listing(place.root.rpartition("/")[2], found)

    def _is_usable(self, place: Place, file: Found) -> bool:
        """Whether a tool has written it: not a registry, no pipe or device. Raises NotWhole: a link leads out."""
        if file.name.rpartition("/")[2] in (MANIFEST, RECORD):
            return False
        if not place.is_local:
            return True
        path, root = f"{place.root}/{file.name}", os.path.realpath(place.root)
        if file.is_link and not os.path.realpath(path).startswith(f"{root}/"):
            raise NotWhole(self.uri, f"{file.name} is a link that leads out of the directory; put the file there")
        return os.path.isfile(path)

    def path(self, name: str) -> str:
        """Return the path of a file, as the file system knows it."""
        return self._place.path(name)

    @contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        """Open a file for reading.

        Raises:
            StorageError: it could not be read.
        """
        with self._place.open_reader(name) as file, self._place.named("read", name):
            yield file

    def head(self, name: str, size_bytes: int) -> bytes:
        """Return the first bytes of a file."""
        with self.open(name) as file:
            return file.read(size_bytes)

    def tail(self, name: str, size_bytes: int) -> bytes:
        """Return the last bytes of a file."""
        with self.open(name) as file:
            file.seek(max(0, self.listing.files[name] - size_bytes))
            return file.read(size_bytes)

    def read_json(self, name: str) -> Any:
        """Return what a file of JSON says.

        Raises:
            NotWhole: it is no JSON, as one that was cut off, or is too long.
            StorageError: it could not be read.
        """
        data = self.head(name, JSON_MAX_BYTES + 1)
        if len(data) > JSON_MAX_BYTES:
            raise NotWhole(self.uri, f"{name} is longer than {JSON_MAX_BYTES} bytes")
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise NotWhole(self.uri, f"{name} is no JSON ({error}), as after a crash in the middle of it") from None
