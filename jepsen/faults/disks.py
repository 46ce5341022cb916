"""A small disk for each member, which can be filled: a file system in memory, mounted at its data directory.

Only the member sees it: it is mounted in a mount namespace, which a process (the keeper) holds open. So a disk outlives
its member's lives and disappears with the harness in any case. Root is not needed where users may create namespaces.

These disks do not test durability: the data of a killed member stays in memory, as in the kernel's cache elsewhere.

Example::

    disks = Disks()
    command = [*disks.enter(1, folder / "data"), "python", "-m", "raftkv", ...]
    disks.fill(1)
    disks.free(1)
    disks.close()

Not here: the behaviour of a full disk, which is the member's responsibility.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

SIZE_BYTES: Final = 512 * 1024 * 1024
_PIECES_BYTES: Final = (1024 * 1024, 4096)
_READY: Final = b"mounted\n"
_KEEP: Final = 'mount -t tmpfs -o size="$1",mode=700 none "$2" && echo mounted && read line'


class DiskError(Exception):
    """The system refused to mount a disk; the text is one line."""


class Disks:
    """The disks of a cluster, by the numbers of its members."""

    def __init__(self) -> None:
        self._keepers: dict[int, subprocess.Popen[bytes]] = {}
        self._places: dict[int, Path] = {}

    def enter(self, number: int, place: Path) -> list[str]:
        """Return a command prefix for processes that see the disk; the first call creates the disk.

        Arguments:
            number: number of the member.
            place: directory to mount the disk on.

        Raises:
            DiskError: the disk cannot be mounted.
        """
        if number not in self._keepers:
            self._mount(number, place.resolve())
        user = () if os.geteuid() == 0 else ("--user", "--preserve-credentials")
        return ["nsenter", *user, "--mount", "--target", str(self._keepers[number].pid), "--wdns=" + os.getcwd(), "--"]

    def path(self, number: int) -> Path:
        """Return the path of the disk's content for processes outside the namespace.

        Arguments:
            number: number of the member.
        """
        return Path(f"/proc/{self._keepers[number].pid}/root{self._places[number]}")

    def fill(self, number: int) -> None:
        """Fill the disk to the last page.

        Arguments:
            number: number of the member.
        """
        with self._ballast(number).open("ab", buffering=0) as file:
            for piece in _PIECES_BYTES:
                try:
                    while True:
                        file.write(bytes(piece))
                except OSError:
                    continue

    def free(self, number: int) -> None:
        """Free the space again.

        Arguments:
            number: number of the member.
        """
        self._ballast(number).unlink(missing_ok=True)

    def wipe(self, number: int) -> None:
        """Destroy the content of the disk, if there is one.

        Arguments:
            number: number of the member, which must be down.
        """
        if number in self._keepers:
            for entry in self.path(number).iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def close(self) -> None:
        """Release all disks; they disappear when the members have ended."""
        for keeper in self._keepers.values():
            keeper.kill()
            keeper.communicate()
        self._keepers.clear()

    def _ballast(self, number: int) -> Path:
        return self.path(number) / "ballast"

    def _mount(self, number: int, place: Path) -> None:
        place.mkdir(parents=True, exist_ok=True)
        namespaces = ("--mount",) if os.geteuid() == 0 else ("--user", "--map-root-user", "--mount")
        command = ["unshare", *namespaces, "sh", "-c", _KEEP, "sh", str(SIZE_BYTES), str(place)]
        keeper = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )  # the keeper ends with this process, because its standard input is then closed
        if keeper.stdout is None or keeper.stderr is None or keeper.stdout.readline() != _READY:
            why = keeper.communicate()[1].decode(errors="replace").strip()
            raise DiskError(f"no disk for member {number} can be mounted on {place}: {why or 'no word why'}")
        self._keepers[number], self._places[number] = keeper, place
