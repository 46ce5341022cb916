"""``raftkv.local``: its clusters serve, and leave nothing behind however the program ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from raftkv.client import local as product
from raftkv.client.local import LocalClusterError
from raftkv.errors import ConfigError
from tests.procs import PATIENCE_S, http_get, wait_for

local = partial(product.local, timeout_s=PATIENCE_S)


def _holders(directory: str) -> list[int]:
    """Processes whose command line names the directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if directory.encode() in words:
                found.append(int(entry.name))
    return found


def _is_gone(directory: str) -> bool:
    return not Path(directory).exists() and not _holders(directory)


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 3])
def test_every_member_serves_and_nothing_is_left(size, tmp_path):
    with local(size, directory=tmp_path) as cluster:
        assert len(cluster.endpoints) == size
        assert [http_get(endpoint, "/health")[0] for endpoint in cluster.endpoints] == [200] * size
        directory = str(cluster.directory)
    assert _is_gone(directory)
    assert list(tmp_path.iterdir()) == []


def test_an_exception_in_the_block_passes_and_nothing_is_left(tmp_path):
    cluster = local(directory=tmp_path)
    with pytest.raises(KeyError), cluster:
        raise KeyError("of the user")
    assert list(tmp_path.iterdir()) == []
    assert not _holders(str(tmp_path))


@pytest.mark.long
def test_a_member_is_killed_and_comes_back_with_its_data(tmp_path):
    with local(directory=tmp_path) as cluster, cluster.connect() as kv:
        kv.put("kept", b"1")
        cluster.members[0].kill()
        assert not cluster.members[0].is_running
        cluster.members[0].restart()
        assert kv.get("kept").value == b"1"


@pytest.mark.long
def test_a_member_can_be_paused(tmp_path):
    with local(directory=tmp_path) as cluster:
        member = cluster.members[0]
        member.pause()
        wait_for(lambda: "T" in _state(cluster), "the member to be stopped")
        member.resume()
        assert http_get(member.endpoint, "/health")[0] == 200
        member.stop()
        with pytest.raises(LocalClusterError, match=r"^member node1 does not run$"):
            member.pause()


def _state(cluster) -> str:
    member = next(
        pid for pid in _holders(str(cluster.directory)) if b"serve" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    return Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_member_that_does_not_start_says_why_in_one_line(tmp_path):
    with pytest.raises(LocalClusterError) as caught, local(flags=["--nonsense=1"], directory=tmp_path):
        pass
    assert (
        str(caught.value)
        == "member node1 did not start: raftkv: flag provided but not defined: -nonsense; see raftkv --help"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(LocalClusterError, match="cannot make a temporary directory: No such file"):
        local(directory=tmp_path / "missing").start()


def test_an_even_size_is_refused():
    with pytest.raises(ConfigError, match="1, 3, 5 or 7 members, not 2"):
        local(2)


@pytest.mark.long
def test_settings_of_the_callers_environment_do_not_reach_a_member(tmp_path, monkeypatch):
    monkeypatch.setenv("ETCD_NAME", "somebody-else")
    monkeypatch.setenv("ETCD_LISTEN_CLIENT_URLS", "http://127.0.0.1:1")
    with local(directory=tmp_path) as cluster:
        assert http_get(cluster.endpoints[0], "/health")[0] == 200


PROGRAM = """
import os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
from raftkv.client.local import local

cluster = local(directory=sys.argv[1], timeout_s=90.0).start()
print(cluster.directory, flush=True)
{then}
"""


def _run(tmp_path: Path, then: str) -> tuple[subprocess.Popen[str], str]:
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(then=then), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert program.stdout is not None
    return program, program.stdout.readline().strip()


def _end(program: subprocess.Popen[str]) -> int:
    status = program.wait(PATIENCE_S)
    assert program.stdout is not None
    program.stdout.close()
    return status


@pytest.mark.long
def test_a_program_that_ends_without_closing_leaves_nothing(tmp_path):
    program, directory = _run(tmp_path, "pass")
    assert _end(program) == 0
    assert _is_gone(directory)


@pytest.mark.long
def test_a_program_killed_with_sigkill_leaves_nothing(tmp_path):
    program, directory = _run(tmp_path, "threading.Event().wait()")
    assert len(_holders(directory)) == 2  # the member and its guard
    program.kill()
    assert _end(program) == -signal.SIGKILL
    wait_for(lambda: _is_gone(directory), "the guard to clean up")


@pytest.mark.long
def test_a_forked_child_neither_ends_the_cluster_nor_keeps_it_alive(tmp_path):
    """One child leaves by sys.exit and thus runs atexit; another child outlives the killed program."""
    then = """
if os.fork() == 0:
    cluster.close()
    sys.exit(0)
os.wait()
print(cluster.members[0].is_running, flush=True)
child = os.fork()
if child == 0:
    threading.Event().wait()
print(child, flush=True)
threading.Event().wait()
"""
    program, directory = _run(tmp_path, then)
    assert program.stdout is not None
    assert program.stdout.readline() == "True\n"
    child = int(program.stdout.readline())
    try:
        program.kill()
        program.wait()
        wait_for(lambda: _is_gone(directory), "the guard to clean up while the child still lives")
    finally:
        os.kill(child, signal.SIGKILL)
        program.stdout.close()


@pytest.mark.long
def test_a_program_that_ctrl_c_ends_leaves_nothing(tmp_path):
    # A signal that comes just before a wait without a limit does not end it: Python looks for signals between calls.
    program, directory = _run(tmp_path, "while not threading.Event().wait(0.05): pass")
    program.send_signal(signal.SIGINT)
    assert _end(program) == -signal.SIGINT
    assert _is_gone(directory)
