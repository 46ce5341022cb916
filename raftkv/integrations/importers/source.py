"""The imported directory: its listing, and reads of bounded size, on any file system of fsspec.

    source = Source("/shared/old-job/output")
    source.listing.files["checkpoint-100/trainer_state.json"]     # its size in bytes
    source.read_json("checkpoint-100/trainer_state.json")

Blocking: programs with an event loop call it on a thread. Read-only: nothing below the directory is changed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
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
"""Maximum number of files of an imported directory."""
JSON_MAX_BYTES: Final = 32 * 1024 * 1024
"""Maximum size of a parsed file; the logs in the HF Trainer's state grow with the run."""


@dataclass(frozen=True)
class Listing:
    """The files of a directory.

    Attributes:
        name: last part of the directory name.
        files: name below it, with slashes, to size in bytes; a slash ends the name of a link to a directory.
    """

    name: str
    files: Mapping[str, int]

    @cached_property
    def top(self) -> Mapping[str, int]:
        """The files directly in the directory."""
        return {name: size for name, size in self.files.items() if "/" not in name}

    @cached_property
    def directories(self) -> list[str]:
        """All directories below it, parents first."""
        found = {name[:at] for name in self.files for at, char in enumerate(name) if char == "/"}
        return sorted(found, key=lambda path: (path.count("/"), path))


class Source:
    """A directory or file that another tool has written.

    Arguments:
        uri: path or URL.

    Attributes:
        bad: names of the listing that cannot be imported, with the reason: invalid file names, and links that lead out
            of the directory, to a directory or to nothing. Pipes, devices and a registry's own files are not listed.

    Raises:
        ConfigError: the URI does not exist or has too many files; or fsspec is missing, or does not support the URL.
        StorageError: it could not be listed.
    """

    def __init__(self, uri: str) -> None:
        place = Place(uri)
        self.uri = place.uri
        with place.named("list"):
            if not place.fs.exists(place.root):
                raise ConfigError(f"there is nothing at {self.uri}")
            is_file = bool(place.fs.isfile(place.root))
        self.bad: dict[str, str] = {}
        if is_file:
            self.uri, _, only = self.uri.rpartition("/")
            place = Place(self.uri)
            found = {only: int(place.fs.size(place.path(only)))}
        else:
            found = {name: file.size_bytes for file in place.list() if (name := self._listed(place, file))}
        if len(found) > FILES_MAX:
            raise ConfigError(f"{uri} has {len(found)} files: at most {FILES_MAX}; import its directories one by one")
        self._place = place
        self.listing = Listing(place.root.rpartition("/")[2], found)

    def _listed(self, place: Place, file: Found) -> str:
        """Return the name of a file in the listing; empty: not written by a tool."""
        name, path = file.name, f"{place.root}/{file.name}"
        if name.rpartition("/")[2] in (MANIFEST, RECORD):
            return ""
        if place.is_local and file.is_link:
            name += "/" if os.path.isdir(path) else ""
            if not os.path.exists(path):
                self.bad[name] = f"{name} is a link to nothing; put the file there"
            elif not os.path.realpath(path).startswith(f"{os.path.realpath(place.root)}/"):
                self.bad[name] = f"{name} is a link that leads out of the directory; put the files there"
            elif name != file.name:
                self.bad[name] = f"{name} is a link to a directory; put the directory there"
        elif place.is_local and not os.path.isfile(path):
            return ""
        try:
            check_file_name(file.name)
        except ConfigError as error:
            self.bad[name] = str(error)
        return name

    def check(self, names: Iterable[str]) -> None:
        """Raise NotWhole if one of these names is not allowed."""
        for name in sorted(self.bad.keys() & set(names)):
            raise NotWhole(self.uri, self.bad[name])

    def path(self, name: str) -> str:
        """Return the path of a file for the file system."""
        return self._place.path(name)

    @contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        """Open a file for reading.

        Raises:
            NotWhole: its name is bad.
            StorageError: it could not be read.
        """
        self.check([name])
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
        """Return the content of a JSON file.

        Raises:
            NotWhole: it is not JSON, for example because it is truncated, or it is too long.
            StorageError: it could not be read.
        """
        data = self.head(name, JSON_MAX_BYTES + 1)
        if len(data) > JSON_MAX_BYTES:
            raise NotWhole(self.uri, f"{name} is longer than {JSON_MAX_BYTES} bytes")
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise NotWhole(self.uri, f"{name} is not JSON ({error}), as after a crash in the middle of it") from None
