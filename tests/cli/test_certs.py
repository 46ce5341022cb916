"""``raftkv certs``: a cluster's certificates in one command, which the members it prints flags for can use."""

from __future__ import annotations

import errno
import json
import os
import shlex
import stat
from pathlib import Path
from typing import Any

import pytest

from raftkv.cli import certs as command
from raftkv.cli.program import CommandError
from raftkv.cli.server_options import read_options
from raftkv.config import TLSFiles
from raftkv.rpc.status import Code
from raftkv.server.tls.certificates import Revocations
from raftkv.server.tls.context import Rules
from raftkv.server.tls.ports import Ports, PortSecurity
from tests.rpc.loop import failure
from tests.server.tls.room import asked, serving


@pytest.fixture
def made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    words = [str(tmp_path / "tls"), "a=127.0.0.1", "b=127.0.0.1,b.example", "--client", "alice,bob", "--json"]
    assert command.main(words) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def _client(folder: Path, name: str) -> PortSecurity:
    path = folder / "tls" / "clients" / name
    files = TLSFiles(f"{path}.crt", f"{path}.key", trusted_ca_file=str(folder / "tls" / "ca.crt"))
    return PortSecurity("client", files, Rules())


async def test_members_start_with_the_printed_flags_and_clients_have_names(made, tmp_path):
    a, b = (Ports.of(read_options(made["start"][name][1:], {}).config, lambda: ["127.0.0.1"]) for name in "ab")
    async with serving(a.client) as clients, serving(a.peer) as peers:
        assert await asked(clients.target, _client(tmp_path, "alice").dialing) == "alice"
        assert await asked(peers.target, b.peer.dialing) == "b"
        # A client is no peer, a peer is no user, and a member's certificate for clients is neither.
        for target, caller in (
            (peers.target, _client(tmp_path, "alice").dialing),
            (clients.target, b.peer.dialing),
            (clients.target, a.client.dialing),
        ):
            assert (await failure(asked(target, caller))).code is Code.UNAVAILABLE
        assert len(clients.certificates) == len(peers.certificates) == 1


def test_files_are_private_and_nothing_is_written_over(made, tmp_path, capsys):
    folder = tmp_path / "tls"
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert all(path.stat().st_mode & 0o077 == 0 for path in (folder, *folder.rglob("*")))
    assert len(files) == 4 + 2 * 6 + 2 * 2
    for words in (["a=127.0.0.2"], ["c=127.0.0.3", "--client", "bob"], ["c=not a host"], ["../x=127.0.0.1"]):
        with pytest.raises(CommandError) as raised:
            command.main([str(folder), *words])
        assert "\n" not in str(raised.value)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == files
    # What is new is added under the same authorities.
    assert command.main([str(folder), "c=127.0.0.3", "--client", "carol"]) == 0
    assert {path: path.read_bytes() for path in files} == files
    assert shlex.join(made["start"]["a"]).startswith("raftkv --name a --listen-client-urls https://127.0.0.1:2379 ")
    shown = capsys.readouterr().out
    assert "raftkv join https://127.0.0.1:2379 --name c " in shown
    assert "--initial-cluster" not in shown, "it would found a cluster of its own"
    assert "RAFTKV_CERT, RAFTKV_KEY" in shown


def test_members_of_one_host_are_told_to_change_their_ports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(tmp_path / "tls"), "a=127.0.0.1", "b=127.0.0.1"]) == 0
    assert "need ports of their own" in capsys.readouterr().out
    assert command.main([str(tmp_path / "other"), "a=127.0.0.1", "b=127.0.0.2"]) == 0
    assert "need ports of their own" not in capsys.readouterr().out


async def test_a_renewed_member_is_the_same_to_everybody(made, tmp_path, capsys):
    folder = str(tmp_path / "tls")
    a = Ports.of(read_options(made["start"]["a"][1:], {}).config)
    async with serving(a.client) as clients:
        assert await asked(clients.target, _client(tmp_path, "bob").dialing) == "bob"
        old = a.client.ends["server"].time_s
        assert command.main(["renew", folder, "--member", "a", "--client", "bob", "--days", "700"]) == 0
        assert await asked(clients.target, _client(tmp_path, "bob").dialing) == "bob"
        assert a.client.ends["server"].time_s > old + 300 * 86_400, "taken up without a restart"
    assert "127.0.0.1,localhost,::1" in capsys.readouterr().out


async def test_revoked_clients_and_members(made: dict[str, Any], tmp_path: Path) -> None:
    folder = str(tmp_path / "tls")
    bob = _client(tmp_path, "bob")
    assert command.main(["revoke", folder, "--client", "bob", "--member", "b"]) == 0
    assert command.main(["revoke", folder, "--client", "alice"]) == 0
    words = [*made["start"]["a"][1:], f"--client-crl-file={folder}/ca.crl", f"--peer-crl-file={folder}/peer-ca.crl"]
    a = Ports.of(read_options(words, {}).config)
    assert isinstance(a.client.revocations, Revocations)
    (serials,) = a.client.revocations._serials.values()
    assert len(serials) == 3, "bob, the server certificate of b, and alice"
    async with serving(a.client) as clients:
        assert (await failure(asked(clients.target, bob.dialing))).code is Code.UNAVAILABLE
        # The name can be given again, and what was revoked stays so.
        assert command.main([folder, "--client", "bob"]) == 0
        assert await asked(clients.target, _client(tmp_path, "bob").dialing) == "bob"


def test_listing(made: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["list", str(tmp_path / "tls"), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["certificates"]
    assert listed == made["certificates"]
    assert [one["kind"] for one in listed] == ["authority"] * 2 + ["server", "peer"] * 2 + ["client"] * 2
    assert command.main(["list", str(tmp_path / "tls")]) == 0
    assert "| authority |" in capsys.readouterr().out


def test_listing_names_expired_certificates(made, tmp_path, capsys):
    command.Folder(str(tmp_path / "tls"), is_new=False).renew(["a"], [], 0)
    assert command.main(["list", str(tmp_path / "tls")]) == 0
    marked = [line for line in capsys.readouterr().out.splitlines() if "(expired)" in line]
    assert [line.split("|")[1].strip() for line in marked] == ["server", "peer"]


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        ([], 2, "certs takes a directory; see raftkv certs --help"),
        (["DIR", "a"], 2, "certs: 'a' is not NAME=HOST[,HOST...]"),
        (["DIR", "a=x", "a=y"], 2, "certs: member a is given twice"),
        (["DIR", "--client", "eve,eve"], 2, "certs: client eve is given twice"),
        (["revoke", "DIR", "--client", "eve", "--client", "eve"], 2, "certs: client eve is given twice"),
        (["renew", "DIR", "--member", "a,a"], 2, "certs: member a is given twice"),
        (["DIR", "--days", "0"], 2, "--days must be a whole number from 1 to 99999 (set to '0')"),
        (["renew", "DIR"], 2, "certs renew: --member or --client says which"),
        (
            ["renew", "DIR", "--client", "x"],
            1,
            "certs: there is no DIR/clients/x.crt; `raftkv certs list` shows what is",
        ),
        (["list", "DIR", "a"], 2, "certs list takes only a directory"),
        (["revoke", "DIR", "a"], 2, "certs revoke takes only a directory: name members with --member, clients with --"),
        (["list", "DIR/nowhere"], 1, "certs: DIR/nowhere does not exist"),
        (["renew", "DIR/nowhere", "--client", "x"], 1, "certs: DIR/nowhere does not exist"),
        (["revoke", "DIR/nowhere", "--client", "x"], 1, "certs: DIR/nowhere does not exist"),
        (["DIR", "a b=x"], 1, "certs: 'a b' cannot be a name: letters, digits and . _ @ -, at most 64"),
    ],
)
def test_refusals(tmp_path: Path, words: list[str], code: int, line: str) -> None:
    with pytest.raises(CommandError) as raised:
        command.main([word.replace("DIR", str(tmp_path)) for word in words])
    assert not (tmp_path / "nowhere").exists()
    assert raised.value.code == code
    assert str(raised.value).startswith(line.replace("DIR", str(tmp_path)))


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--help"]) == 0
    assert "raftkv certs renew DIRECTORY" in capsys.readouterr().out


@pytest.mark.parametrize("writes", range(1, 19))
def test_a_full_disk_leaves_nothing_in_the_way(tmp_path, monkeypatch, capsys, writes):
    """The same command works when there is room again, and founds the same cluster; one member more is none of it."""
    words, left, real = [str(tmp_path / "tls"), "a=127.0.0.1", "b=127.0.0.2", "--client", "bob"], [writes], os.fsync

    def fsync(descriptor: int) -> None:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            left[0] -= 1
            if not left[0]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CommandError, match=r"^certs: cannot write .*: No space left on device$"):
        command.main(words)
    monkeypatch.undo()
    assert command.main(["list", str(tmp_path / "tls")]) == 0
    assert [path for path in (tmp_path / "tls").rglob("*") if path.is_file()] == []
    assert command.main(words) == 0
    assert "--initial-cluster a=https://127.0.0.1:2380,b=https://127.0.0.2:2380 " in capsys.readouterr().out
    assert command.main(["renew", str(tmp_path / "tls"), "--member", "a", "--client", "bob"]) == 0
    assert not [*(tmp_path / "tls").glob(".*")]


def test_certificates_survive_a_full_disk(made: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    (folder / "clients" / "eve.key").touch()  # a client's certificate cannot be written then
    with pytest.raises(CommandError, match="already exists"):
        command.main([str(folder), "c=127.0.0.3", "--client", "dan,eve"])
    (folder / "clients" / "eve.key").unlink()
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == files
