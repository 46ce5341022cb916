"""``raftkvutl wal dump`` and ``wal verify``: what a log holds, also while its member runs.

A record is a line, or with ``--json`` an object; see ``raftkv.offline.log``.
"""

from __future__ import annotations

from raftkv.cli.exits import CommandError
from raftkv.cli.goflags.command import Invocation
from raftkv.cli.output.json_format import encode, plain
from raftkv.cli.utl.output import Cell, check_format, show
from raftkv.offline import log
from raftkv.offline.directory import log_of


def verify(invocation: Invocation) -> None:
    """Check a whole log and print what it is."""
    check_format(invocation["write-out"])
    found = log.verify(_directory(invocation))
    marker = found.markers[-1].index if found.markers else 0
    cells = [
        Cell("clusterId", "ClusterID", "cluster id", found.cluster_id, f"{found.cluster_id:x}"),
        Cell("memberId", "MemberID", "member id", found.member_id, f"{found.member_id:x}"),
        Cell("segments", "Segments", "segments", found.segments),
        Cell("sizeBytes", "Size", "size", found.size_bytes),
        Cell("firstIndex", "FirstIndex", "first index", found.first_index),
        Cell("lastIndex", "LastIndex", "last index", found.last_index),
        Cell("term", "Term", "term", found.hard_state.term),
        Cell("commit", "Commit", "commit", found.hard_state.commit),
        Cell("marker", "Marker", "marker", marker),
        Cell("torn", "Torn", "torn", found.torn, found.torn or "whole"),
    ]
    show(invocation, cells)


def dump(invocation: Invocation) -> None:
    """Print every record of a log."""
    directory = _directory(invocation)
    start, end = invocation["start"], invocation["end"] if "end" in invocation.changed else None
    for found in log.contents(directory, start, end):
        print(encode(log.row(found, plain)) if invocation["json"] else log.line(found))


def _directory(invocation: Invocation) -> str:
    if len(invocation.arguments) != 1:
        raise CommandError(f"accepts 1 arg(s), received {len(invocation.arguments)}")
    return log_of(invocation.arguments[0])
