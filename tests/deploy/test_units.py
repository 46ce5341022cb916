"""The unit of systemd: understood word for word, closed, and with settings that a member takes."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from raftkv.cli.join import read_plan
from raftkv.cli.server_options import read_options
from raftkv.config import ServerConfig
from raftkv.server import main
from tests import installed

UNITS = Path(__file__).resolve().parents[2] / "deploy" / "systemd"
UNIT = UNITS / "raftkv.service"
EXPOSURE_MAX = 15
"""Tenths: systemd calls up to 4 well protected; what is left is the network, which a member needs."""


def settings(name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", UNIT.read_text(), re.MULTILINE)


def test_systemd_understands_every_word(tmp_path):
    program = tmp_path / settings("ExecStart")[0].split()[0].lstrip("/")
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    place = tmp_path / "etc/systemd/system"
    place.mkdir(parents=True)
    (place / UNIT.name).write_text(UNIT.read_text())
    for target in Path("/usr/lib/systemd/system").glob("*.target"):
        shutil.copy(target, place)
    command = [installed.program("systemd-analyze"), f"--root={tmp_path}", "verify", UNIT.name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_service_may_do_little_beside_its_work():
    command = [
        installed.program("systemd-analyze"),
        "security",
        "--offline=true",
        f"--threshold={EXPOSURE_MAX}",
        str(UNIT),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_statuses_that_no_start_mends_end_it():
    assert settings("RestartPreventExitStatus") == [f"2 {main.NEEDS_UPGRADE_STATUS}"]


def environment() -> dict[str, str]:
    """What systemd makes of the unit and of the file of settings, for a member on host a."""
    text = " ".join(settings("Environment")).replace("%S", "/var/lib").replace("%d", "/run/credentials")
    lines = [*shlex.split(text), *(UNITS / "raftkv.env").read_text().splitlines()]
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def test_the_member_takes_all_settings():
    options = read_options([], environment())
    config = options.config
    assert options.warnings == []
    assert str(config.data_dir) == "/var/lib/raftkv"
    credentials = {name: f"/run/credentials/{name}" for name in credential_names()}
    assert {config.client_tls.cert_file, config.client_tls.key_file, config.client_tls.trusted_ca_file} | {
        config.peer_tls.cert_file,
        config.peer_tls.key_file,
        config.peer_tls.trusted_ca_file,
    } == set(credentials.values())
    assert [pair.split("=")[0] for pair in config.initial_cluster.split(",")] == ["a", "b", "c"]
    assert config.auto_compaction_retention_s == 72 * 3600


def credential_names() -> list[str]:
    pairs = [line.split(":") for line in settings("LoadCredential")]
    assert all(Path(path) == Path("/etc/raftkv/tls") / name for name, path in pairs)
    return [name for name, _ in pairs]


@pytest.fixture
def joining() -> dict[str, str]:
    """The settings of a host that joins: the line of the file that is a comment there, without the founders."""
    text = (UNITS / "raftkv.env").read_text()
    (line,) = re.findall(r"^#(RAFTKV_JOIN=.*)$", text, re.MULTILINE)
    return {**environment(), **dict([line.split("=", 1)])}


def test_a_host_that_joins_has_the_same_unit(joining):
    _, *words = joining.pop("RAFTKV_JOIN").split()
    del joining["ETCD_INITIAL_CLUSTER"]
    # The address stands for any member's; 127.0.0.1 is one that every machine has a way to.
    plan = read_plan(["https://127.0.0.1:2379", *words[1:]], without_certificates(joining))
    assert isinstance(plan.config, ServerConfig)
    assert plan.config.auto_promote
    assert plan.config.initial_cluster_state == "existing"


def without_certificates(variables: dict[str, str]) -> dict[str, str]:
    return {name: text for name, text in variables.items() if not re.search("_(CERT|KEY|CA)_FILE$", name)} | {
        "ETCD_INSECURE_PEERS": "true",
        "ETCD_LISTEN_CLIENT_URLS": "http://10.0.0.1:2379",
        "ETCD_ADVERTISE_CLIENT_URLS": "http://10.0.0.1:2379",
        "ETCD_LISTEN_PEER_URLS": "http://10.0.0.1:2380",
        "ETCD_INITIAL_ADVERTISE_PEER_URLS": "http://10.0.0.1:2380",
    }


def test_accounts_and_folders_are_read(tmp_path):
    for folder in ("etc", "var/lib"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (tmp_path / "etc/group").write_text("root:x:0:\n")
    command = [installed.program("systemd-sysusers"), f"--root={tmp_path}", "-"]
    text = (UNITS / "raftkv.sysusers").read_text()
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^raftkv:x:\d+:\d+:raftkv:/var/lib/raftkv:", (tmp_path / "etc/passwd").read_text(), re.MULTILINE)
    command = [installed.program("systemd-tmpfiles"), f"--root={tmp_path}", "--create", "-"]
    text = (UNITS / "raftkv.tmpfiles").read_text()
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "etc/raftkv").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "etc/raftkv/tls").stat().st_mode & 0o777 == 0o700
