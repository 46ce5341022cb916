"""Progress bars of bytes, or of things, on a terminal; nothing elsewhere, so that logs and pipes stay clean.

with byte_bar("verifying") as on_progress:
    verify(checkpoint, on_progress=on_progress)      # told of bytes done and of all, from any thread
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def byte_bar(what: str, *, hidden: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on standard error inside the block, if that is a terminal; yields what is to be told of bytes.

    Arguments:
        what: before the bar.
        hidden: show none, as for JSON.
    """
    if hidden or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


@contextmanager
def count_bar(what: str, total: int, *, hidden: bool = False) -> Iterator[Callable[[], None]]:
    """Show a bar of things that are done, as ``byte_bar`` does; yields what is to be called for each.

    Arguments:
        what: before the bar.
        total: how many there are.
        hidden: show none, as for JSON.
    """
    if hidden or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=total)
        yield lambda: bars.advance(task)
