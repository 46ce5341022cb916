"""Tracker files of DeepSpeed and Megatron: what those tools read there, and what a death or a freeze leaves."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import raftkv
from raftkv.checkpoint import Checkpoint, Registry
from raftkv.checkpoint import trackers as under_test
from raftkv.checkpoint.errors import StorageError
from raftkv.checkpoint.storage.rank_files import RankFiles
from raftkv.checkpoint.trackers import DEEPSPEED, MEGATRON, Trackers
from raftkv.errors import ConfigError


@pytest.fixture(scope="module")
def kv() -> Iterator[raftkv.Client]:
    with raftkv.local() as cluster, cluster.connect() as kv:
        yield kv


@pytest.fixture
def registry(kv: raftkv.Client, tmp_path: Path, request: pytest.FixtureRequest) -> Registry:
    return Registry(kv, request.node.name, uri=str(tmp_path / "job"))


def commit(registry: Registry, step: int) -> Checkpoint:
    attempt = registry.begin(registry.claim(), step)
    files = RankFiles(attempt.uri)
    files.write("model.bin", str(step).encode())
    attempt.prepare(0, files.finish())
    return attempt.commit()


def write(registry: Registry) -> Checkpoint | None:
    loop, inner = registry.target()
    return loop.run(Trackers(inner, (DEEPSPEED, MEGATRON)).write())


def found_by_deepspeed(directory: str) -> bytes:
    """Read as its ``load_checkpoint`` without a tag."""
    tag = Path(directory, "latest").read_text(encoding="utf-8").strip()
    return Path(directory, tag, "model.bin").read_bytes()


def found_by_megatron(directory: str) -> bytes:
    """Read as its ``read_metadata`` and ``get_checkpoint_name``."""
    text = Path(directory, "latest_checkpointed_iteration.txt").read_text(encoding="utf-8").strip()
    return Path(directory, f"iter_{int(text):07d}", "model.bin").read_bytes()


def found(registry: Registry) -> tuple[bytes, bytes]:
    return found_by_deepspeed(registry.uri), found_by_megatron(registry.uri)


@pytest.mark.long
def test_both_tools_find_the_newest_commit(registry):
    assert write(registry) is None
    assert not os.path.exists(registry.uri)
    for step in (5, 70):
        checkpoint = commit(registry, step)
        assert write(registry) == checkpoint
        assert found(registry) == (str(step).encode(),) * 2
    assert {name for name in os.listdir(registry.uri) if "part" in name} == set()


def test_death_between_commit_and_tracker_leaves_the_previous_one(registry):
    commit(registry, 1)
    write(registry)
    commit(registry, 2)
    assert found(registry) == (b"1", b"1"), "it exists still"
    write(registry)  # the next start
    assert found(registry) == (b"2", b"2")


def test_a_frozen_writer_that_thaws_puts_right_what_it_wrote(registry, monkeypatch):
    """It renames its old name over the new one, looks again, and writes the new one."""
    commit(registry, 1)
    real, seen = under_test.write_all, []

    def frozen(uri: str, tools: tuple[str, ...], checkpoint: Checkpoint) -> None:
        if not seen:
            newer = commit(registry, 2)
            real(uri, tools, newer)
        seen.append(checkpoint.step)
        real(uri, tools, checkpoint)

    monkeypatch.setattr(under_test, "write_all", frozen)
    write(registry)
    assert seen == [1, 2]
    assert found(registry) == (b"2", b"2")


def test_links_to_deleted_checkpoints_go(registry):
    gone = commit(registry, 1)
    write(registry)
    for name in os.listdir(gone.uri):
        os.unlink(Path(gone.uri, name))
    os.rmdir(gone.uri)
    os.symlink("/mnt/archive/iter_0000000", Path(registry.uri, "iter_0000000"))  # on a disk that is away just now
    commit(registry, 2)
    write(registry)
    left = sorted(name for name in os.listdir(registry.uri) if name.startswith("iter_"))
    assert left == ["iter_0000000", "iter_0000002"]


def test_impossible_trackers_are_refused(kv):
    loop, inner = Registry(kv, "job", uri="memory://job").target()
    with pytest.raises(ConfigError, match="use a local directory"):
        loop.run(made(inner, (DEEPSPEED,)))
    with pytest.raises(ConfigError, match="not of"):
        loop.run(made(inner, ("nemo",)))


async def made(registry, tools):
    return Trackers(registry, tools)


def test_a_directory_that_cannot_be_listed_is_an_error_of_one_line(registry, monkeypatch):
    def refuse(_: str) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    commit(registry, 1)
    monkeypatch.setattr(under_test.os, "scandir", refuse)
    with pytest.raises(StorageError, match=r"cannot look for links in .*: .*Stale file handle"):
        write(registry)
