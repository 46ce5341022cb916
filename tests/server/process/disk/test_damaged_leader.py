"""A flipped bit on the disk of a leader whose follower needs the database does not cost the quorum."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.compat.wire import Wire
from tests.procs import RAFTKV, Cluster, wait_for
from tests.server.process.process import leader_of, log_of, must_put, put, value_of, wait_for_end, wait_for_equal_hashes

pytestmark = pytest.mark.long

FLAGS = ["--snapshot-count", "20", "--snapshot-catchup-entries", "5"]
NEEDLE = b"needle-of-the-leader-" * 4


def flip(path: Path, needle: bytes) -> None:
    """Flip a bit in each occurrence of a needle, in place as a disk would."""
    data = path.read_bytes()
    offsets = [found.start() + 3 for found in re.finditer(re.escape(needle), data)]
    assert offsets, f"{needle!r} is not in {path}"
    with path.open("r+b") as file:
        for offset in offsets:
            file.seek(offset)
            file.write(bytes([data[offset] ^ 0x10]))


def test_a_flipped_bit_of_the_leader_reaches_no_follower() -> None:
    with Cluster(RAFTKV, size=3, flags=FLAGS) as cluster, Wire(cluster.endpoints) as wire:
        must_put(wire, "damaged", NEEDLE)
        leader = leader_of(wire)
        behind, healthy = ((leader + step) % 3 for step in (1, 2))
        cluster.members[behind].stop()
        for number in range(100):
            must_put(wire, f"k{number}", b"v" * 100, leader)
        database = cluster.members[leader].data_dir / "member" / "snap" / "db"
        wait_for(lambda: b"k99" in database.read_bytes(), "the database to have all")
        flip(database, NEEDLE)
        cluster.members[behind].start()
        assert wait_for_end(cluster.members[leader]) == 1
        last = log_of(cluster.members[leader]).rstrip().splitlines()[-1]
        assert last.startswith(
            f"raftkv: stopped: the database {database} of this member ({cluster.members[leader].name}, "
        )
        assert "record of revision 2.0 is corrupt" in last
        cluster.members[behind].wait_ready()
        wait_for(lambda: put(wire, "after", b"v", healthy).code == "OK", "the quorum of the others")
        assert value_of(wire, "damaged", healthy) == NEEDLE
        assert value_of(wire, "damaged", behind) == NEEDLE
        revision = must_put(wire, "again", b"v", behind)
        with Wire([cluster.members[place].endpoint for place in (behind, healthy)]) as two:
            wait_for_equal_hashes(two, revision)
