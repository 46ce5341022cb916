"""Each system call of a member fails once: the member keeps serving, refuses, or stops with one line."""

from __future__ import annotations

import asyncio
import errno
import gc
import itertools
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import raftkv.aio
from raftkv.cli.program import described
from raftkv.client.rpc import methods
from raftkv.config import ServerConfig
from raftkv.errors import UNKNOWN, ConfigError, RaftKVError, StatusError, StorageError, explain
from raftkv.loop.turns import LoopTurns
from raftkv.pb import rpc_pb2
from raftkv.server import main
from raftkv.server.joining import origin_of
from raftkv.server.member import Member
from raftkv.server.tls.ports import Ports
from tests.procs import free_port
from tests.rpc.loop import until
from tests.system_faults import Call, Calls

SHARDS = 4
"""Tests that share the calls among them, so that all processes of a run have some."""
NUMBERS = (errno.EIO, errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EMFILE)
KEYS = 4
OF_THE_SECOND = ("restart", "more writes", "stop again")
"""Phases after the restart."""


def _config(directory: Path) -> ServerConfig:
    client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    return ServerConfig(
        name="a",
        data_dir=str(directory / "a"),
        listen_client_urls=(client,),
        advertise_client_urls=(client,),
        listen_peer_urls=(peer,),
        initial_advertise_peer_urls=(peer,),
        initial_cluster=f"a={peer}",
        wal_archive_dir=str(directory / "archive"),
        snapshot_count=5,
        snapshot_catchup_entries=1,
        heartbeat_interval_s=0.02,
        election_timeout_s=0.2,
        backend_batch_interval_s=0.01,
    )


def _learner(config: ServerConfig, directory: Path) -> ServerConfig:
    other = _config(directory)
    return replace(
        other,
        name="b",
        data_dir=str(directory / "b"),
        wal_archive_dir="",
        initial_cluster=f"{config.initial_cluster},b={other.listen_peer_urls[0]}",
        initial_cluster_state="existing",
    )


class Story:
    """What two members live through: start, writes, compaction, defragmentation, copies, a learner, stop, restart."""

    def __init__(self, directory: Path, calls: Calls) -> None:
        self.directory = directory
        self.calls = calls
        self.config = _config(directory)
        self.acknowledged: dict[str, bytes] = {}
        self.unknown: dict[str, set[bytes]] = {}
        self.refusals: list[str] = []
        self.learner_failure: BaseException | None = None

    def run(self) -> tuple[int, int]:
        """Return how the first run of the member ended, and the second."""
        self.calls.phase = "start"
        first = _serve(self.config, self._first)
        self.calls.phase = "restart"
        return int(first), int(_serve(self.after_its_process(), self._second))

    def after_its_process(self) -> ServerConfig:
        """Return the settings for a start on a copy: locks and maps of a failed member last as long as its process."""
        before = Path(self.config.data_dir)
        after = before.with_name(before.name + "+")
        subprocess.run(["cp", "-a", "--sparse=always", str(before), str(after)], check=True)
        self.config = replace(self.config, data_dir=str(after))
        return self.config

    async def _first(self, member: Member) -> None:
        async with raftkv.aio.connect(self.config.listen_client_urls[0], timeout_s=1.0) as kv:
            self.calls.phase = "writes"
            await self._write(kv, "first")
            self.calls.phase = "compaction"
            await self._asked(kv.compact(member.puts() // 2 + 1, physical=True))
            self.calls.phase = "defragmentation"
            await self._asked(kv.scope.call(methods.DEFRAGMENT, rpc_pb2.DefragmentRequest(), 5))
            self.calls.phase = "copy"
            await self._asked(kv.snapshot(self.directory / "saved.db"))
            self.calls.phase = "learner"
            await self._asked(self._join(kv, member))
            await self._write(kv, "with a learner")
        self.calls.phase = "stop"
        member.stop()

    async def _second(self, member: Member) -> None:
        async with raftkv.aio.connect(self.config.listen_client_urls[0], timeout_s=1.0) as kv:
            self.calls.phase = "more writes"
            await self._write(kv, "again")
        self.calls.phase = "stop again"
        member.stop()

    async def _write(self, kv: Any, what: str) -> None:
        for number in range(4 * KEYS):
            key, value = f"k{number % KEYS}", f"{what} {number}".encode() + bytes(2_000)
            self.unknown.setdefault(key, set()).add(value)
            if await self._asked(kv.put(key, value)):
                self.acknowledged[key] = value
                self.unknown[key] = set()

    async def _join(self, kv: Any, member: Member) -> None:
        config = _learner(self.config, self.directory)
        await kv.member_add(config.initial_advertise_peer_urls, learner=True)
        other = Member(config, LoopTurns(), None, await origin_of(config, Ports.of(config).peer.dialing))
        running = asyncio.create_task(other.run())
        await until(lambda: running.done() or bool(member.failure) or _is_level(other, member))
        self.calls.phase = "learner stops"
        other.stop()
        await running
        if other.failure is not None:
            _check_explained(explain(other.failure))
            assert isinstance(other.failure, RaftKVError | OSError)

    async def _asked(self, asked: Awaitable[Any]) -> bool:
        try:
            await asked
        except StatusError as error:
            self.refusals.append(f"{error.code} {error}")
            return False
        except (StorageError, ConfigError) as error:  # of a file of the client, or of the learner's start
            self.refusals.append(f"local {error}")
            return False
        return True


def _serve(config: ServerConfig, on_ready: Callable[[Member], Awaitable[None]]) -> int:
    """Serve as the command line does."""
    try:
        return main.serve(config, on_ready=on_ready)
    except OSError as error:
        print(f"raftkv: {described(error)}", file=sys.stderr)
        return 1


def _is_level(other: Member, member: Member) -> bool:
    return other._durable.store.revision >= member._durable.store.revision


def _check_explained(line: str) -> None:
    assert "\n" not in line
    assert not re.search(r"\[Errno|Traceback|: *$|: ;", line), line


@pytest.fixture(autouse=True)
def _process() -> Iterator[None]:
    """Undo what a member does to its process."""
    interval, thresholds, mask, callbacks = (
        sys.getswitchinterval(),
        gc.get_threshold(),
        os.umask(0o077),
        gc.callbacks[:],
    )
    yield
    sys.setswitchinterval(interval)
    gc.set_threshold(*thresholds)
    gc.callbacks[:] = callbacks
    gc.unfreeze()
    gc.collect()  # connections of members that failed
    gc.freeze()  # as tests/conftest.py has it: every later collection of this process would look at all modules
    os.umask(mask)


class Watched:
    """Notes failures that no caller sees: tracebacks in the log, and errors of threads and tasks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog
        self._strays: list[str] = []
        monkeypatch.setattr(threading, "excepthook", lambda args: self._strays.append(f"thread: {args.exc_value!r}"))
        monkeypatch.setattr(sys, "unraisablehook", self._lost)

    def _lost(self, args: Any) -> None:
        # A member that failed leaves its connections to the end of its process.
        if not isinstance(args.exc_value, ResourceWarning):
            self._strays.append(f"lost: {args.exc_value!r}")

    def check(self) -> None:
        gc.collect()
        tracebacks = [record.getMessage() for record in self._caplog.records if record.exc_info]
        assert not tracebacks
        assert not self._strays
        for record in self._caplog.records:
            if record.levelno >= logging.WARNING:
                assert "[Errno" not in record.getMessage(), record.getMessage()


Run = Callable[[Sequence[Call], int], None]


@pytest.fixture
def run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    """Live through the story with failures, then look at the data after a last start."""
    monkeypatch.setattr(main.logs, "configure", lambda config: None)
    watched = Watched(monkeypatch, caplog)

    def lived(failing: Sequence[Call], number: int) -> None:
        caplog.clear()
        shutil.rmtree(tmp_path)  # of the run before: a log takes 64 MiB
        (tmp_path / "archive").mkdir(parents=True)
        story = Story(tmp_path, Calls())
        with story.calls.failing(dict.fromkeys(failing, number)):
            ended = story.run()
        said = capsys.readouterr().err.splitlines()
        assert len(said) == sum(status == 1 for status in ended), said
        for line in said:
            assert line.startswith("raftkv: ")
            _check_explained(line)
        for refusal in story.refusals:
            assert not refusal.startswith(f"{UNKNOWN} ") or number not in (errno.ENOSPC, errno.EDQUOT), refusal
            _check_explained(refusal)
        watched.check()
        found: dict[str, bytes] = {}

        async def look(member: Member) -> None:
            async with raftkv.aio.connect(story.config.listen_client_urls[0]) as kv:
                found.update({kv_.key.decode(): kv_.value for kv_ in await kv.range("k", prefix=True)})
            member.stop()

        assert _serve(story.after_its_process(), look) != 1, capsys.readouterr().err
        for key in {*story.acknowledged, *found}:
            assert found.get(key) in {story.acknowledged.get(key), *story.unknown[key]}, key

    return lived


@pytest.mark.long
@pytest.mark.parametrize("shard", range(SHARDS))
def test_each_call_of_the_system_fails_once(run: Run, tmp_path: Path, shard: int) -> None:
    calls = Calls()
    (tmp_path / "noted" / "archive").mkdir(parents=True)
    with calls.noted():
        assert 1 not in Story(tmp_path / "noted", calls).run()
    # Each once, where it is met last: what is called in a start is called in the restart, too.
    found = list({call[1:]: call for call in calls.seen if not call.place.startswith("client/")}.values())
    assert len(found) >= 80
    failures = []
    for at, failing in list(enumerate(_pairs(found)))[shard::SHARDS]:
        number = NUMBERS[at % len(NUMBERS)]
        try:
            run(failing, number)
        except (AssertionError, BaseExceptionGroup, OSError) as error:
            names = " and ".join(map(" ".join, failing))
            failures.append(f"{names} {errno.errorcode[number]}: {str(error)[:600]}")
    assert not failures, "\n".join(failures)


def _pairs(calls: Sequence[Call]) -> list[list[Call]]:
    """Put a call of the first process and one of the second into one story, as long as there are both."""
    second = [call for call in calls if call.phase in OF_THE_SECOND]
    first = [call for call in calls if call not in second]
    return [[call for call in pair if call] for pair in itertools.zip_longest(first, second)]
