"""Records as an attacker would write them: each field with a wrong type, size or path, and records under other keys.

for value in spoiled(record.encode()): ...      # one field of it is spoiled, at any depth
for sample in SAMPLES: ...                      # a record of each kind that any part keeps, and its key
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from raftkv.checkpoint import positions
from raftkv.checkpoint import records as checkpoint
from raftkv.checkpoint.keys import AttemptId, RegistryKeys
from raftkv.cli.backup import Manifest
from raftkv.client.records import Record
from raftkv.dataset.keys import DatasetKeys, Head, Note
from raftkv.integrations.torchft.rules import JobKeys, MemberRecord, QuorumRecord
from raftkv.training import records as training
from raftkv.training.records import RunKeys
from raftkv.training.scheduling import admission as scheduling
from raftkv.training.scheduling.denylist import Denial

WRONG: Final[tuple[Any, ...]] = (
    None, True, [], {}, "", "text", -1, 2**64, 10**400, 1.5, 1e300, float("nan"), float("inf"), [None], {"a": None},
    {"": [{}]},
)  # fmt: skip
"""Values of another type, or beyond any program's counters; JSON can express each of them."""
LARGE: Final[tuple[Any, ...]] = ("x" * 30_000, ["x"] * 3_000, {str(number): "x" for number in range(3_000)})
PATHS: Final[tuple[str, ...]] = (
    "/", "/etc/passwd", "..", "../victim/x", "a/../../x", "a\0b", "a\nb", "\x1b[2J", "\ud800", "memory://",
    "file:///etc", "s3://other/bucket", "%2e%2e%2f", "victim@files@1",
)  # fmt: skip


FEW: Final[tuple[Any, ...]] = (None, -1, 2**63, 10**400, "x" * 3_000, "/etc", "../victim/x", "a\nb", "victim@files@1")
"""For tests of consumers, each of which takes a while."""


def spoiled(value: bytes, wrongs: Sequence[Any] = (*WRONG, *PATHS, *LARGE)) -> Iterator[bytes]:
    """Yield the JSON of a record with one field spoiled: for each field, each wrong value."""
    plain = json.loads(value)
    for path in _paths(plain):
        for wrong in wrongs:
            yield json.dumps(_replaced(plain, path, wrong)).encode()


def _paths(plain: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = plain.items() if isinstance(plain, dict) else enumerate(plain) if isinstance(plain, list) else ()
    for name, item in items:
        yield (*path, name)
        yield from _paths(item, (*path, name))


def _replaced(plain: Any, path: tuple[Any, ...], wrong: Any) -> Any:
    if not path:
        return wrong
    copy = dict(plain) if isinstance(plain, dict) else list(plain)
    copy[path[0]] = _replaced(copy[path[0]], path[1:], wrong)
    return copy


class Sample(NamedTuple):
    """A record, and its key; empty: it is part of another record, or of a file."""

    record: Record
    key: str = ""


_RUN: Final = RegistryKeys("job")
_ID: Final = AttemptId(7, 2, 500123)
_AT: Final = 1_800_000_000.0
_PARENT: Final = checkpoint.Reference("base", "dcp", 3)
_FILE: Final = checkpoint.FileRecord("sub/a.bin", 5, "sha256:" + "0" * 64)
_MEMBER: Final = training.Member("a-1", "a", "10.0.0.1", 4, "row1/rack7")
_NEED: Final = scheduling.Need("a-1", "a", 2)
_CLAIM: Final = scheduling.Claim("job", 1, 2, 1, 2, (_NEED,), ("a-1",), 3)
BACKUP: Final = Manifest(
    "raftkv-20261122T183000Z-00000000000000ff", _AT, 255, -1, 7, 301, 4096, "ab", 1, 2, "h:2379", _AT, 1
)
SAMPLES: Final[tuple[Sample, ...]] = (
    Sample(checkpoint.FenceRecord(2, "round/9", "h:1", _AT), _RUN.fence),
    Sample(_FILE),
    Sample(
        checkpoint.Offer("sub/a.bin", 5, "sha256:" + "0" * 64, "sha256:" + "1" * 64),
        _RUN.attempt("files", _ID).offer("sub/a.bin"),
    ),
    Sample(_PARENT, _RUN.tag("release")),
    Sample(
        checkpoint.AttemptRecord(7, 2, 500123, "files", 2, "memory://job/step", _PARENT, {"a": "b"}, "h:1", _AT),
        _RUN.attempt("files", _ID).head,
    ),
    Sample(checkpoint.Prepared(1, (_FILE,)), _RUN.attempt("files", _ID).rank(1)),
    Sample(
        checkpoint.Checkpoint(
            "job",
            7,
            2,
            500123,
            "files",
            2,
            "memory://job/step",
            "sha256:" + "1" * 64,
            "sha256:" + "2" * 64,
            1,
            5,
            _PARENT,
            {"loss": 0.5},
            {"a": "b"},
            "h:1",
            _AT,
            2.5,
        ),
        _RUN.record("files", 7),
    ),
    Sample(checkpoint.Extremes(0.1, 3, 0.9, 7)),
    Sample(checkpoint.Latest(7, 2, 3, 15, {"loss": checkpoint.Extremes(0.1, 3, 0.9, 7)}, _AT), _RUN.latest("files")),
    Sample(checkpoint.Hold("h:1", _AT), _RUN.hold("files", 7, "pin", "reader@1f")),
    Sample(checkpoint.Deleting("memory://job/step", "old", _AT, "c1"), _RUN.deleting("files", _ID)),
    Sample(checkpoint.HolderRecord("n1.2", "a", "10.0.0.1:4000", "0" * 64, "rack7"), _RUN.holder("n1.2")),
    Sample(
        checkpoint.CopyRecord(
            "files", 7, 2, 500123, "rank-0", "sha256:" + "0" * 64, 12, "n1.2", "a", "10.0.0.1:4000", "0" * 64, "rack7"
        ),
        _RUN.copy("files", _ID, "rank-0", "n1.2"),
    ),
    Sample(positions.Used(1, 100, ((0, 50),), "images")),
    Sample(positions.State(1, 100, 10, 2, ((50, 100),), ((0, 50),), "images"), f"{_RUN.base}position/train/state"),
    Sample(positions.TakenRange(50, 60, 55, 1, 3, "t1"), f"{_RUN.base}position/train/taken/000000000000050"),
    Sample(positions.Position(1, 100, 50, 4, "images")),
    Sample(Head("a" * 64, 3, 10, 1000, 2, 500, "p1", _AT), DatasetKeys("images").head),
    Sample(Note("h:1", _AT), DatasetKeys("images").pin(3, "job")),
    Sample(_MEMBER),
    Sample(
        training.Node("a-1", "a", "10.0.0.1", 4, "row1", 3, 2, 1, 8, {"x": "y"}, _AT), f"{RunKeys('job').base}node/a-1"
    ),
    Sample(training.GenerationRecord(3, (_MEMBER,), _AT), RunKeys("job").round),
    Sample(
        training.State(3, "broken", "r", "exit", "a-1", 2, 1, 8, _AT, "slots", {"b": "denied"}), RunKeys("job").state
    ),
    Sample(
        training.Head(3, "running", max_nodes=8, time=_AT, digest="a" * 16, left=(1,), added=((1, _MEMBER),)),
        RunKeys("job").state,
    ),
    Sample(training.Fault(3, "a-1", "a", 5, "signal", 9, "SIGKILL", "m", _AT), f"{RunKeys('job').base}fault/3/000005"),
    Sample(_NEED),
    Sample(_CLAIM),
    Sample(scheduling.Ledger((_CLAIM,), {"a": 8}, 4), scheduling.ClusterKeys("gpu").ledger),
    Sample(scheduling.HostRecord(8), f"{scheduling.ClusterKeys('gpu').hosts}a"),
    Sample(Denial("a", "job", "r", 60, _AT), f"{scheduling.ClusterKeys('gpu').base}deny/a"),
    Sample(MemberRecord("d/1", "AAAA"), JobKeys("ft").member("d", "r")),
    Sample(QuorumRecord(4, {"r": "d/1"}, {"r": "AAAA"}, _AT, "c"), JobKeys("ft").quorum),
    Sample(BACKUP, BACKUP.name),
)
