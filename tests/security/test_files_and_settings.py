"""Attacks by files and settings: logs that lie, directories that others may write to, numbers that make no sense."""

from __future__ import annotations

import os

import pytest

from raftkv.cli.program import CommandError
from raftkv.cli.server_options import read_options
from raftkv.raft.types import Entry, HardState
from raftkv.storage.wal import WALCorruptError
from raftkv.storage.wal.record import HEADER_BYTES, encode_entries, encode_frame, encode_hard_state
from raftkv.storage.wal.segment import SegmentReader
from tests.cli.runner import run_server
from tests.fuzz.memory import measured
from tests.procs import ETCD_FAST, RAFTKV, Cluster, ProcessError, Program
from tests.storage.wal.helpers import append_synced, create, last_segment, recover
from tests.storage.wal.simdisk import SimDisk

MEMORY_MAX_BYTES = 4 << 20


def _log() -> tuple[SimDisk, str, SegmentReader]:
    disk = SimDisk()
    wal = create(disk)
    append_synced(wal, 1, 5)
    wal.close()
    name = last_segment(disk)
    image = disk.contents()[name]
    reader = SegmentReader(name, image, len(image))
    for _ in reader.frames():
        pass
    return disk, name, reader


def _with_frame(body: bytes, announced_bytes: int | None = None) -> SimDisk:
    """A log with one more frame, whose checksums are right; its header may announce another length."""
    disk, name, reader = _log()
    pieces, _ = encode_frame(body, reader.offset, reader.offset, reader.crc, reader.seed)
    frame = bytearray(b"".join(pieces))
    if announced_bytes is not None:
        frame[4:8] = announced_bytes.to_bytes(4, "little")
    image = disk.contents()[name]
    image = image[: reader.offset] + frame + image[reader.offset + len(frame) :]
    return SimDisk.holding(disk.contents() | {name: image})


def _refused(disk: SimDisk, reason: str) -> None:
    def work() -> None:
        with pytest.raises(WALCorruptError, match=reason):
            recover(disk)

    assert measured(work).peak_bytes < MEMORY_MAX_BYTES


@pytest.mark.parametrize("size", [2**32 - 1, 2**31, 1 << 30])
def test_cve_2020_15106_a_length_of_gigabytes_is_damage_and_no_allocation(size: int) -> None:
    body = encode_hard_state(HardState(1, 1, 5))
    _refused(_with_frame(body, size), "damaged")
    record = size.to_bytes(4, "little") + bytes(4)
    _refused(_with_frame(record + bytes(40)), f"record of {size} bytes beyond")


@pytest.mark.parametrize("index", [2**64 - 1, 2**63, 10**9, 0])
def test_cve_2020_15112_an_entry_of_an_absurd_index_is_damage_and_no_panic(index: int) -> None:
    parts: list[bytes] = []
    encode_entries([Entry(1, index, b"x")], parts)
    _refused(_with_frame(b"".join(parts)), "follows entry 5|overwrites what is committed")


def test_a_log_that_commits_more_than_it_has_is_damage() -> None:
    _refused(_with_frame(encode_hard_state(HardState(1, 1, 2**63))), "entry 9223372036854775808 was committed")


def _serves(program: Program, mode: int, flags: list[str]) -> bool:
    cluster = Cluster(program, flags=flags)
    directory = cluster.members[0].data_dir
    if mode:
        directory.mkdir()
        os.chmod(directory, mode)
    try:
        with cluster:
            return True
    except ProcessError:
        return False


@pytest.mark.long
@pytest.mark.parametrize(("program", "serves"), [(RAFTKV, False), (ETCD_FAST, True)], ids=["raftkv", "etcd"])
def test_cve_2020_15113_a_directory_that_others_may_write_to_is_refused(program: Program, serves: bool) -> None:
    assert _serves(program, 0o777, []) == serves


@pytest.mark.parametrize(
    "flag",
    [
        "auto-compaction-retention=-1",
        "auto-compaction-retention=-1h",
        "snapshot-count=-1",
        "snapshot-count=0",
        "max-txn-ops=-1",
        "max-request-bytes=-1",
        "max-concurrent-streams=-1",
        "heartbeat-interval=-100",
        "election-timeout=-1000",
        "backend-batch-limit=-1",
        "grpc-keepalive-min-time=-5s",
        "quota-backend-bytes=9223372036854775808",
    ],
)
def test_tob_011_and_014_numbers_below_zero_are_refused(flag: str) -> None:
    with pytest.raises(CommandError):
        read_options([f"--{flag}"], {})


@pytest.mark.parametrize("words", [("gateway", "start"), ("grpc-proxy", "start")])
def test_cve_2020_15114_there_is_no_gateway_that_could_call_itself(words: tuple[str, ...]) -> None:
    ran = run_server(words)
    assert (ran.code, ran.errors) == (1, f"raftkv: {words[0]} is not implemented in raftkv\n")


def test_the_header_of_a_frame_is_as_long_as_these_tests_think() -> None:
    assert HEADER_BYTES == 32
