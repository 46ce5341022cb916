"""Secrets that go through every path of a cluster, and then every byte that it has left is searched for them."""

from __future__ import annotations

import base64
import os
import re
import secrets
import subprocess
import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import raftkv
from raftkv.client.rpc.core import ClientOptions
from raftkv.errors import RaftKVError
from raftkv.pb import rpc_pb2
from raftkv.raft.types import Entry
from raftkv.storage.wal import walk
from tests.compat.wire import Wire
from tests.procs import RAFTKV, ROOT, Cluster, free_port, http_get, wait_for
from tests.security.certificates import Files, make

pytestmark = pytest.mark.long
AUTH = "etcdserverpb.Auth"
ROOT_PASSWORD = "root-" + secrets.token_hex(12)


def _canary(name: str) -> str:
    return f"canary-{name}-{secrets.token_hex(12)}"


def forms(secret: str) -> list[bytes]:
    """A secret as it may have been written: as it is, in base64 at any offset, in hexadecimal, with doubled zeros."""
    plain = secret.encode()
    found = [plain, plain.hex().encode(), plain.hex().upper().encode(), secret.encode("utf-16-le")]
    # The characters at the ends depend on the neighbours.
    return found + [base64.b64encode(bytes(offset) + plain)[4:-4] for offset in range(3)]


@dataclass
class World:
    """A cluster with users, and the secrets that have gone through it."""

    cluster: Cluster
    wire: Wire
    secrets: dict[str, str]
    shown: list[str]
    """What programs, clients and errors have printed."""

    def secret(self, name: str) -> str:
        """A new password that must not be found anywhere."""
        self.secrets[name] = _canary(name)
        return self.secrets[name]

    def call(self, method: str, request: Any, token: str = "", timeout_s: float = 20.0) -> Any:
        """Call; what is answered is searched too, but for the token itself."""
        metadata = (("token", token),) if token else ()
        pending = self.wire.start(f"{AUTH}/{method}", request.SerializeToString(), 0, metadata, timeout_s)
        answer = pending.answer()
        self.shown.append(f"{answer.code} {answer.text}")
        return answer.message

    def login(self, user: str, password: str) -> str:
        """A token; empty if the password is refused."""
        message = self.call("Authenticate", rpc_pb2.AuthenticateRequest(name=user, password=password))
        return message.token if message is not None else ""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def world(files: Files) -> Iterator[World]:
    cluster = Cluster(RAFTKV, size=3)
    for member in cluster.members:
        tls = f"https://127.0.0.1:{free_port()}"
        member.flags += [
            "--log-level=debug",
            "--bcrypt-cost=4",
            f"--listen-client-urls=http://{member.endpoint},{tls}",
            f"--cert-file={files('member.crt')}",
            f"--key-file={files('member.key')}",
            f"--audit-log={member.directory / (member.name + '.audit')}",
            "--audit-level=all",
            f"--wal-archive-dir={member.directory / 'archive'}",
            "--wal-archive-timeout=1s",
        ]
    with cluster, Wire(cluster.endpoints) as wire:
        world = World(cluster, wire, {}, [])
        _go_through_everything(world)
        yield world


def _go_through_everything(world: World) -> None:
    world.secrets["root"] = ROOT_PASSWORD
    world.call("UserAdd", rpc_pb2.AuthUserAddRequest(name="root", password=ROOT_PASSWORD))
    world.call("UserGrantRole", rpc_pb2.AuthUserGrantRoleRequest(user="root", role="root"))
    world.call("AuthEnable", rpc_pb2.AuthEnableRequest())
    token = world.secrets["token"] = world.login("root", ROOT_PASSWORD)
    assert token, world.shown
    _raw_calls(world, token)
    _command_lines(world)
    _library(world)
    _while_nobody_answers(world, token)


def _raw_calls(world: World, token: str) -> None:
    add, change = rpc_pb2.AuthUserAddRequest, rpc_pb2.AuthUserChangePasswordRequest
    world.call("UserAdd", add(name="alice", password=world.secret("added")), token)
    world.call("UserAdd", add(name="alice", password=world.secret("added-twice")), token)
    world.call("UserAdd", add(name="", password=world.secret("nobodys")), token)
    world.call("UserAdd", add(name="eve", password=world.secret("without-token")))
    world.call("UserAdd", add(name="long", password=world.secret("long") + "x" * 80), token)
    world.call("UserChangePassword", change(name="alice", password=world.secret("changed")), token)
    world.call("UserChangePassword", change(name="absent", password=world.secret("of-nobody")), token)
    world.secrets["alice-token"] = world.login("alice", world.secrets["changed"])
    assert world.secrets["alice-token"]
    assert not world.login("alice", world.secret("wrong"))
    assert not world.login("absent", world.secret("unknown"))
    assert not world.login(world.secret("as-a-name"), "x")
    world.secrets.pop("as-a-name")  # names are no secrets: they are in logs
    bad = world.secret("bad-token")
    world.call("UserList", rpc_pb2.AuthUserListRequest(), bad)
    world.call("UserList", rpc_pb2.AuthUserListRequest(), world.secrets["alice-token"])


def _run(world: World, *words: str, **environment: str) -> None:
    """Run raftkvctl; what it prints is searched, and its own command line is the user's affair."""
    command = [sys.executable, "-m", "raftkv.cli.ctl", f"--endpoints={world.cluster.endpoints[0]}", *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    ran = subprocess.run(command, env=env, capture_output=True, timeout=60, check=False, input=b"")
    world.shown.append((ran.stdout + ran.stderr).decode(errors="replace"))


def _command_lines(world: World) -> None:
    alice = world.secrets["changed"]
    _run(world, f"--user=alice:{alice}", "get", "k", "--debug")
    _run(world, "--user=alice", f"--password={world.secret('ctl-wrong')}", "get", "k", "--debug")
    _run(world, "put", "k", "v", "--debug", ETCDCTL_USER=f"alice:{alice}")
    _run(world, "get", "k", "--debug", ETCDCTL_USER="alice", ETCDCTL_PASSWORD=world.secret("environment"))
    _run(world, f"--user=root:{ROOT_PASSWORD}", "snapshot", "save", str(world.cluster.directory / "saved"))
    _run(world, f"--user=alice:{alice}", "--command-timeout=1ms", "get", "k")
    _run(world, f"--user=alice:{alice}", "--nonsense")


def _library(world: World) -> None:
    endpoints = world.cluster.endpoints
    for password in (world.secrets["changed"], world.secret("library-wrong")):
        options = ClientOptions(user="alice", password=password, token=world.secrets["alice-token"])
        world.shown += [repr(options), str(options)]
        client = raftkv.connect(endpoints, user="alice", password=password)
        world.shown.append(repr(client))
        with client:
            try:
                world.shown.append(repr(client.get("k")))
            except RaftKVError as error:
                world.shown.append("".join(traceback.format_exception(error)) + repr(error))
    with raftkv.connect(endpoints, token=world.secrets["bad-token"]) as client:
        with pytest.raises(RaftKVError) as caught:
            client.get("k")
        world.shown.append(repr(client) + "".join(traceback.format_exception(caught.value)))


def _while_nobody_answers(world: World, token: str) -> None:
    """Without a quorum every path that logs its failures is taken."""
    for member in world.cluster.members[1:]:
        member.kill()
    world.call("Authenticate", rpc_pb2.AuthenticateRequest(name="alice", password=world.secrets["changed"]), "", 1.0)
    request = rpc_pb2.AuthUserAddRequest(name="bob", password=world.secret("without-quorum"))
    world.call("UserAdd", request, token, 1.0)
    for member in world.cluster.members[1:]:
        member.restart()
    wait_for(lambda: bool(world.login("alice", world.secrets["changed"])), "a login after the outage")


def _search(where: str, data: bytes, secrets_: dict[str, str]) -> list[str]:
    return [f"{name} in {where}" for name, secret in secrets_.items() for form in forms(secret) if form in data]


def _hits(world: World, found: Iterable[tuple[str, bytes]]) -> list[str]:
    # The secret part of a token is what stands before the dot.
    searched = {name: value.partition(".")[0] for name, value in world.secrets.items()}
    return [hit for where, data in found for hit in _search(where, data, searched)]


def test_the_search_finds_what_is_there() -> None:
    secret = _canary("itself")
    for text in (secret.encode(), base64.b64encode(b"ab" + secret.encode() + b"c"), secret.encode().hex().encode()):
        assert _search("text", b"..." + text + b"...", {"itself": secret})


def test_nothing_that_programs_print_has_a_secret(world: World) -> None:
    assert len(world.shown) > 25
    assert _hits(world, [(text[:60], text.encode()) for text in world.shown]) == []


def test_no_metrics_have_a_secret(world: World) -> None:
    pages = [http_get(endpoint, path)[2] for endpoint in world.cluster.endpoints for path in ("/metrics", "/health")]
    assert _hits(world, [("metrics", page.encode()) for page in pages]) == []


def test_no_process_has_a_secret_in_its_command_line_or_would_dump_it(world: World) -> None:
    for member in world.cluster.members:
        assert member.process is not None
        process = Path(f"/proc/{member.process.pid}")
        assert _hits(world, [("cmdline", (process / "cmdline").read_bytes())]) == []
        assert int((process / "coredump_filter").read_text(), 16) == 0


def _written(path: Path) -> bytes:
    """What is in a file, with its long runs of zeros made short: logs are allocated ahead."""
    return re.sub(rb"\0{16,}", bytes(16), path.read_bytes())


def _key_lines(files: Files) -> list[bytes]:
    return [line for line in Path(files("member.key")).read_bytes().splitlines() if not line.startswith(b"-")]


@pytest.fixture
def stopped(world: World) -> Iterator[World]:
    """The members do not run, so all that they keep is in files."""
    for member in world.cluster.members:
        member.stop()
    yield world
    for member in world.cluster.members:
        member.start()
    world.cluster.wait_ready()


def test_no_file_has_a_secret(stopped: World, files: Files) -> None:
    world = stopped
    paths = [path for path in world.cluster.directory.rglob("*") if path.is_file()]
    kinds = {path.suffix or path.name for path in paths}
    assert {".wal", ".audit", ".log", "saved"} <= kinds, kinds
    contents = [(str(path.relative_to(world.cluster.directory)), _written(path)) for path in paths]
    assert _hits(world, contents) == []
    assert [where for where, data in contents for line in _key_lines(files) if line in data] == []
    entries = [
        (f"an entry of {directory.parent.parent.name}", found.what.data)
        for directory in {path.parent for path in paths if path.suffix == ".wal"}
        for found in walk(str(directory))
        if isinstance(found.what, Entry)
    ]
    assert len(entries) > 30
    assert _hits(world, entries) == []
    # The search would have found what is meant to be there.
    assert any(b"alice" in data for _, data in entries)
