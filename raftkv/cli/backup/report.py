"""What ``raftkv backup`` prints: a line or an object for each thing done, and progress bars on a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from raftkv.cli.backup.manifest import Manifest


class Report:
    """Prints what happened: to standard output what was done, to standard error what failed.

    Arguments:
        json: one object a line, and no progress bars.
    """

    def __init__(self, *, json: bool) -> None:
        self._json = json

    def _say(self, text: str, event: str, **fields: Any) -> None:
        print(json.dumps({"event": event, **fields}) if self._json else text, flush=True)

    def taken(self, backup: Manifest) -> None:
        """A backup is there and verified."""
        size = f"{backup.size_bytes / 1e6:.1f} MB"
        text = f"backup {backup.name}: revision {backup.revision}, {size}, from {backup.endpoint}, verified"
        self._say(text, "taken", **asdict(backup))

    def verified(self, backup: Manifest) -> None:
        """A backup was verified again."""
        text = f"backup {backup.name}: revision {backup.revision}, hash {backup.hash}, verified"
        self._say(text, "verified", name=backup.name, revision=backup.revision, hash=backup.hash)

    def restored(self, name: str, revision: int, data_dir: str) -> None:
        """A data directory was made, at a revision."""
        text = f"restored {name} to {data_dir}, revision {revision}"
        self._say(text, "restored", name=name, revision=revision, data_dir=data_dir)

    def deleted(self, name: str) -> None:
        """A file or backup that is not needed any more is gone."""
        self._say(f"deleted {name}", "deleted", name=name)

    def failed(self, why: str, name: str = "") -> None:
        """Something failed, and the command goes on."""
        if self._json:
            self._say("", "failed", name=name, error=why)
        else:
            print(f"raftkv backup: {why}", file=sys.stderr, flush=True)

    def table(self, backups: Sequence[Manifest]) -> None:
        """Print all backups."""
        if self._json:
            for backup in backups:
                self._say("", "backup", **asdict(backup))
            return
        from raftkv.cli.output.table import render

        rows = [[one.name, _time(one.taken_s), str(one.revision), str(one.size_bytes), one.endpoint] for one in backups]
        print(render(["name", "taken", "revision", "size", "endpoint"], rows))

    @contextmanager
    def progress(self) -> Iterator[_Bars]:
        """Show progress bars inside the block, on a terminal."""
        if self._json or not sys.stderr.isatty():
            yield _Bars(None)
            return
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
            yield _Bars(bars)


class _Bars:
    """Progress bars, or none.

    Arguments:
        bars: rich's; None: nothing is shown.
    """

    def __init__(self, bars: Any) -> None:
        self._bars = bars
        self._receiving: Any = None

    def received(self, done: int, total: int) -> None:
        """A snapshot is on its way: bytes received, of all."""
        if self._bars is not None:
            if self._receiving is None or done < self._bars.tasks[self._receiving].completed:
                self._receiving = self._bars.add_task("receiving", total=total)
            self._bars.update(self._receiving, completed=done, total=total)

    def copied(self, what: str, total: int) -> Callable[[int], None]:
        """Begin a bar; returns what is to be told of more bytes."""
        if self._bars is None:
            return lambda size: None
        task = self._bars.add_task(what, total=total)
        return lambda size: self._bars.advance(task, size)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
