"""The container file, read: what it copies is there, what it installs has a hash, and no process is root in the end."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

from raftkv import __version__
from raftkv.client.local import ServerProcess, is_healthy
from tests.procs import PATIENCE_S, free_port, wait_for

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "deploy/container/Containerfile"
TEXT = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", FILE.read_text(), flags=re.MULTILINE))
STEPS = [line.split(None, 1) for line in TEXT.splitlines() if line.strip()]
LAST = STEPS[max(number for number, (word, _) in enumerate(STEPS) if word == "FROM") :]


def all_of(word: str, steps: list[list[str]] = STEPS) -> list[str]:
    return [rest for name, rest in steps if name == word]


def only(word: str) -> str:
    (found,) = all_of(word, LAST)
    return found


def variables() -> dict[str, str]:
    return dict(pair.split("=", 1) for line in all_of("ENV", LAST) for pair in shlex.split(line))


def test_every_step_is_one_that_builders_know():
    known = "ARG FROM ENV RUN WORKDIR COPY LABEL USER VOLUME EXPOSE STOPSIGNAL HEALTHCHECK ENTRYPOINT"
    assert {word for word, _ in STEPS} <= set(known.split())


def test_copied_files_exist_and_are_not_ignored():
    kept = [line[1:] for line in (ROOT / ".containerignore").read_text().splitlines() if line.startswith("!")]
    for words in map(shlex.split, all_of("COPY")):
        if words[0].startswith("--from="):
            continue
        for source in words[:-1]:
            assert (ROOT / source).exists(), source
            assert any(fnmatch(source.split("/")[0], name) for name in kept), f".containerignore leaves {source} out"
    assert (ROOT / ".dockerignore").read_text() == (ROOT / ".containerignore").read_text()


def test_installed_packages_have_a_hash():
    installs = re.findall(r"pip[^&]*? (?:install|wheel) [^&]*", " && ".join(all_of("RUN")))
    assert len(installs) == 5
    for install in installs:
        hashed = "--require-hashes --only-binary :all: -r requirements/" in install
        own = "--no-build-isolation" in install or "--no-index /dist/" in install
        assert hashed or own, install
        assert "--no-deps" in install, install
    for lock in re.findall(r"-r (\S+)", TEXT):
        assert "--hash=sha256:" in (ROOT / lock).read_text()


def test_the_hot_path_is_compiled_by_what_is_locked():
    (build,) = [rest for rest in all_of("RUN") if " wheel " in rest]
    assert build.startswith("RAFTKV_NATIVE=${RAFTKV_NATIVE} ")
    assert "RAFTKV_NATIVE=1" in all_of("ARG")
    assert "-r requirements/native.lock" in TEXT
    assert {"gcc", "libc6-dev", "python3-dev"} <= set(TEXT.split())
    assert not {"gcc", "python3-dev"} & set(" ".join(rest for _, rest in LAST).split())


def test_the_last_stage_has_neither_pip_nor_root():
    assert "pip" not in " ".join(rest for _, rest in LAST)
    assert re.fullmatch(r"([1-9]\d+):([1-9]\d+)", only("USER"))
    chart = yaml.safe_load_all((ROOT / "deploy/kubernetes/raftkv.yaml").read_text())
    (pod,) = [each["spec"]["template"]["spec"] for each in chart if each["kind"] == "StatefulSet"]
    assert only("USER") == "{runAsUser}:{runAsGroup}".format(**pod["securityContext"])


def test_the_image_says_what_it_is():
    labels = dict(pair.split("=", 1) for pair in shlex.split(only("LABEL")))
    assert labels["org.opencontainers.image.version"] == __version__
    assert only("STOPSIGNAL") == "SIGTERM"
    assert only("ENTRYPOINT") == '["raftkv"]'
    assert Path(variables()["ETCD_DATA_DIR"]).is_relative_to(only("VOLUME"))
    assert variables()["ETCD_LISTEN_METRICS_URLS"] + "/readyz" in only("HEALTHCHECK")


def check_words() -> list[str]:
    """The health check of the image, with this interpreter."""
    words: list[str] = yaml.safe_load(only("HEALTHCHECK").split("CMD", 1)[1])
    assert words[0] == "/opt/raftkv/bin/python"
    return [sys.executable, *words[1:]]


@pytest.mark.long
def test_as_the_first_process_a_member_is_checked_and_ends_with_0(tmp_path, monkeypatch):
    member = ServerProcess("a", tmp_path, free_port(), free_port())
    url = f"http://127.0.0.1:{free_port()}"
    member.flags = (f"--listen-metrics-urls={url}",)
    member.initial_cluster = f"a={member.peer_url}"
    check = [word.replace(variables()["ETCD_LISTEN_METRICS_URLS"], url) for word in check_words()]
    assert subprocess.run(check, capture_output=True, check=False).returncode == 1
    command = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", *ServerProcess.program)
    monkeypatch.setattr(ServerProcess, "program", command)
    member.start()
    try:
        wait_for(lambda: is_healthy(member.endpoint), "the member")
        assert subprocess.run(check, capture_output=True, check=False).returncode == 0
        outer = member.process.pid
        (inner,) = map(int, Path(f"/proc/{outer}/task/{outer}/children").read_text().split())
        subprocess.run(["kill", f"-{int(signal.SIGTERM)}", str(inner)], check=True)
        assert member.process.wait(PATIENCE_S) == 0, member.last_words()
    finally:
        member.kill()
