"""The directory that processes share: whole files or none, bounded, and nothing in it is believed unverified."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import signal
from pathlib import Path

import pytest

from raftkv.dataset import cache as directory_module
from raftkv.dataset.cache import Memory, SharedDirectory
from raftkv.dataset.codec import digest_of


def blobs(count: int, size: int = 1000) -> dict[str, bytes]:
    made = [number.to_bytes(4, "big") * (size // 4) for number in range(count)]
    return {digest_of(each): each for each in made}


def test_files_are_bounded_and_the_oldest_go(tmp_path: Path) -> None:
    shared = SharedDirectory(tmp_path, 10_000)
    for at, (digest, each) in enumerate(blobs(40).items()):
        shared.put(digest, each)
        os.utime(tmp_path / digest, (at, at))
    shared.trim()
    kept = [digest for digest in blobs(40) if shared.get(digest)]
    assert kept == list(blobs(40))[-10:]


@pytest.mark.parametrize("planted", ["cut off", "other bytes", "a link", "a pipe", "a folder"])
def test_changed_file_is_read_from_the_store(tmp_path: Path, planted: str) -> None:
    ((digest, each),) = blobs(1).items()
    path = tmp_path / digest
    shared = SharedDirectory(tmp_path, 10_000)
    if planted == "a link":
        (tmp_path / "target").write_bytes(each)
        path.symlink_to(tmp_path / "target")
    elif planted == "a pipe":
        os.mkfifo(path)
    elif planted == "a folder":
        path.mkdir()
    else:
        path.write_bytes(each[:-1] if planted == "cut off" else each + b"x")

    async def read() -> bytes:
        return each

    assert asyncio.run(shared.once(digest, read)) == each
    assert asyncio.run(shared.once(digest, read)) == each


@pytest.mark.parametrize(
    "digest", ["/any/file", "../precious", "precious", "locks/../../precious", "", "A" * 64, "0" * 63]
)
def test_a_name_that_is_no_digest_touches_no_file(tmp_path: Path, digest: str) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"data")
    shared = SharedDirectory(tmp_path / "shared", 10_000)
    name = digest.replace("/any/file", str(precious))

    async def read() -> bytes:
        return b"answer"

    assert asyncio.run(shared.once(name, read)) == b"answer"
    assert precious.read_bytes() == b"data"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["locks", "precious", "shared"]


def test_a_holder_that_hangs_is_not_waited_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "WAIT_S", 0.02)
    ((digest, each),) = blobs(1).items()
    shared = SharedDirectory(tmp_path, 10_000)

    async def read() -> bytes:
        return each

    with (tmp_path / "locks" / digest[:3]).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert asyncio.run(shared.once(digest, read)) == each
    assert shared.get(digest) == each


async def test_a_failed_read_lets_the_next_one_try(tmp_path: Path) -> None:
    ((digest, each),) = blobs(1).items()
    shared = SharedDirectory(tmp_path, 10_000)
    calls = 0

    async def read() -> bytes:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise OSError("the store is away")
        return each

    results = list(await asyncio.gather(*(shared.once(digest, read) for _ in range(3)), return_exceptions=True))
    assert sum(isinstance(result, OSError) for result in results) == 1
    assert calls == 2


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_no_process_waits_for_a_lock_that_the_file_system_does_not_have(tmp_path, monkeypatch, number):
    """Each chunk took 5 s, as if another process had been reading it."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    ((digest, each),) = blobs(1).items()
    monkeypatch.setattr(fcntl, "flock", flock)
    shared = SharedDirectory(tmp_path, 10_000)

    async def read() -> bytes:
        return each

    async def main() -> bytes:
        async with asyncio.timeout(directory_module.WAIT_S / 2):
            return await shared.once(digest, read)

    assert asyncio.run(main()) == each
    assert shared.get(digest) == each


def test_a_forked_child_keeps_no_lock_of_its_parent(tmp_path: Path) -> None:
    """Let others go on while a child lives that was forked in the middle: it has the file of the lock open too."""
    ((digest, each),) = blobs(1).items()
    shared, children = SharedDirectory(tmp_path, 10_000), []

    async def read() -> bytes:
        children.append(os.fork())
        if not children[-1]:
            signal.pause()
        return each

    assert asyncio.run(shared.once(digest, read)) == each
    try:
        with open(tmp_path / "locks" / digest[:3], "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(children[0], signal.SIGKILL)
        os.waitpid(children[0], 0)


def test_a_directory_that_is_gone_costs_sharing_and_no_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ((digest, each),) = blobs(1).items()
    shared = SharedDirectory(tmp_path / "gone", 10_000)
    (tmp_path / "gone" / "locks").rmdir()
    (tmp_path / "gone").rmdir()

    async def read() -> bytes:
        return each

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(shared.once(digest, read)) == each
    assert "cannot share dataset chunks" in caplog.text


def test_files_of_dead_processes_are_removed(tmp_path: Path) -> None:
    shared = SharedDirectory(tmp_path, 10_000)
    ((digest, each),) = blobs(1).items()
    left = tmp_path / f".{digest}.99999"
    left.write_bytes(each[:10])
    os.utime(left, (0, 0))
    shared.put(digest, each)
    shared.trim()
    assert not left.exists()
    assert shared.get(digest) == each


@pytest.mark.parametrize("name", [".bashrc", ".env.99999", "notes", f".{'0' * 10}.1", "x.7", ".7"])
def test_files_of_others_are_left_alone(tmp_path: Path, name: str) -> None:
    """The directory may be one that is there, as a home: all its files whose names begin with a dot were deleted."""
    kept = tmp_path / name
    kept.write_bytes(b"of another program")
    os.utime(kept, (0, 0))
    shared = SharedDirectory(tmp_path, 1)
    for digest, each in blobs(3).items():
        shared.put(digest, each)
    shared.trim()
    assert kept.read_bytes() == b"of another program"


def test_memory_keeps_what_was_used_last() -> None:
    cache: Memory[str] = Memory(30)
    for name in "abc":
        cache.put(name, name, 10)
    assert cache.get("a") == "a"
    cache.put("d", "d", 10)
    assert (cache.get("b"), cache.get("a"), cache.size_bytes) == (None, "a", 30)
    cache.put("a", "A", 5)
    cache.put("large", "x", 31)
    assert (cache.get("a"), cache.get("large"), cache.size_bytes, len(cache)) == ("A", None, 25, 3)


def test_process_of_another_container_with_the_same_number_loses_no_file(tmp_path: Path) -> None:
    """Containers that share a directory number their processes each for itself."""
    data = b"chunk"
    shared, digest = SharedDirectory(tmp_path, 1 << 20), digest_of(data)
    half_written = tmp_path / f".{digest}.{os.getpid()}"
    half_written.write_bytes(b"ch")
    shared.put(digest, data)
    assert half_written.read_bytes() == b"ch"
    assert shared.get(digest) == data
