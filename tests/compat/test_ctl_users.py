"""``raftkvctl auth|user|role`` beside etcdctl 3.5.1: the same lines on two servers of one history, byte for byte."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from raftkv.cli.ctl import session
from tests.cli.runner import Ran, run_ctl
from tests.compat.test_ctl_output import ONE_IDENTITY, line, normal, run_etcdctl
from tests.procs import ETCD_FAST, Cluster

FAST_BCRYPT = ("--bcrypt-cost=4",)

LINES = (Path(__file__).parent / "testdata" / "users.txt").read_text(encoding="utf-8").strip().split("\n")
SHORT = r"""
auth status
auth enable
user add alice:pw
user add alice:pw
user add bob
user add carl --no-password
user passwd alice <<< a\nb\n
user passwd alice --interactive=false <<< pw\n
user list -w json
role list -w fields
role add r1
role grant-permission r1 read k
role grant-permission r1 readwrite p/ --prefix
role grant-permission r1 nothing k
role get r1
role get r1 -w fields
user grant-role alice r1
user get alice --detail
user get nobody
role revoke-permission r1 p/ --prefix
user revoke-role alice r1
role delete r1
user delete bob
user add root:root-pw
auth enable
auth status
auth status --user root:root-pw
get k --user alice:bad
get k --user alice:pw
""".strip().split("\n")
"""What `make test` compares; each is a process of etcdctl."""


def twins() -> tuple[Cluster, Cluster]:
    """Two real etcds that no client can tell apart."""
    return Cluster(ETCD_FAST, flags=ONE_IDENTITY + FAST_BCRYPT), Cluster(ETCD_FAST, flags=ONE_IDENTITY + FAST_BCRYPT)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A real etcd that asks for users; there is root alone."""
    with Cluster(ETCD_FAST, flags=FAST_BCRYPT) as cluster:
        for words in ("user add root:rootpw", "auth enable"):
            assert run_ctl(["--endpoints", cluster.endpoints[0], *words.split()]).code == 0
        yield cluster.endpoints[0]


def without_stty(ran: Ran) -> Ran:
    """Etcdctl asks stty to hide what is typed, which complains that nothing is."""
    kept = [text for text in ran.errors.split("\n") if not text.startswith("stty: ")]
    return Ran(ran.code, ran.output, "\n".join(kept))


def without_place(ran: Ran, endpoint: str) -> tuple[int, bytes, str]:
    code, output, errors = normal(ran)
    return code, output.replace(endpoint.encode(), b"<endpoint>"), errors.replace(endpoint, "<endpoint>")


@pytest.mark.long
@pytest.mark.parametrize("lines", [SHORT, pytest.param(LINES, marks=pytest.mark.long)], ids=["short", "whole"])
def test_users_and_roles_as_etcdctl(lines):
    with ExitStack() as started:
        theirs, ours = (started.enter_context(one).endpoints[0] for one in twins())
        compare_lines(theirs, ours, lines)


def compare_lines(theirs, ours, lines):
    differences = []
    for text in lines:
        given = line(text)
        typed = given.standard_input or b"npw\nnpw\n"
        if b"<empty>" in typed:
            typed = b""
        expected = run_etcdctl(["--endpoints", theirs, *given.words], typed)
        found = run_ctl(["--endpoints", ours, *given.words], typed)
        outcomes = [without_place(found, ours), without_place(without_stty(expected), theirs)]
        if outcomes[0] != outcomes[1]:
            differences.append((text, *outcomes))
    assert not differences, differences


ENVIRONMENTS = [
    {"ETCDCTL_USER": "root:rootpw"},
    {"ETCDCTL_USER": "root", "ETCDCTL_PASSWORD": "rootpw"},
    {"ETCDCTL_USER": "root:wrong"},
    {"ETCDCTL_PASSWORD": "rootpw"},
]


@pytest.mark.long
@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_users_of_the_environment(endpoint, environment):
    theirs = ours = endpoint
    words = ["user", "list"]
    expected = run_etcdctl(["--endpoints", theirs, *words], b"", environment)
    found = run_ctl(["--endpoints", ours, *words], b"", environment)
    assert normal(found)[:2] == normal(expected)[:2]


def test_raftkvs_own_variables_say_who_one_is_if_nothing_else_does(endpoint, tmp_path):
    password = tmp_path / "pw"
    password.write_text("rootpw\n")
    at = ["--endpoints", endpoint]
    own = {"RAFTKV_USER": "root", "RAFTKV_PASSWORD_FILE": str(password)}
    assert run_ctl([*at, "user", "list"], b"", own).code == 0
    assert run_ctl([*at, "user", "list", "--user", "root"], b"", {"RAFTKV_PASSWORD_FILE": str(password)}).code == 0
    assert run_ctl([*at, "user", "list", "--user", "root:wrong"], b"", own).code == 2
    both = run_ctl([*at, "user", "list", "--user", "root", "--auth-jwt-token=x"], b"")
    assert (both.code, "exclude each other" in both.errors) == (128, True)


def test_a_password_is_not_shown_by_debug_and_not_by_remarks(endpoint):
    words = ["--endpoints", endpoint, "--debug", "--user", "root:canary-pw", "get", "k"]
    ran = run_ctl(words, b"", {"ETCDCTL_PASSWORT": "canary-pw"})
    assert "ETCDCTL_USER=root:***" in ran.errors
    assert b"canary-pw" not in ran.output + ran.errors.encode()


def test_a_terminal_is_asked_without_showing_what_is_typed(monkeypatch):
    asked = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("getpass.getpass", lambda prompt: asked.append(prompt) or "pw")
    assert session.ask_password("Password: ") == "pw"
    assert asked == ["Password: "]


def test_the_end_of_input_at_a_terminal_is_an_empty_password(monkeypatch, capsys):
    """Ctrl-D at the question was a traceback."""

    def ended(prompt: str) -> str:
        raise EOFError

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("getpass.getpass", ended)
    assert session.ask_password("Password: ") == ""
    assert capsys.readouterr().err == "\n"


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["user", "add", "b\udcff", "--no-password"], b""),
        (["user", "add", "b", "--interactive=false"], b"\xff\n"),
        (["user", "add", "b"], b"\xff\n\xff\n"),
        (["role", "add", "b\udcff"], b""),
        (["downgrade", "validate", "3.\udcff"], b""),
        (["get", "k", "--user", "b\udcff:pw"], b""),
        (["get", "k", "--user", "b"], b"\xff\n"),
    ],
)
def test_invalid_utf_8_is_refused_in_one_line(endpoint, words, given):
    """etcdctl says so too, in the words of its library; here it was a traceback."""
    environment = {**os.environ, "PYTHONUTF8": "1", "LC_ALL": "C"}
    command = [sys.executable, "-m", "raftkv.cli.ctl", "--endpoints", endpoint, *words]
    done = subprocess.run(command, input=given, capture_output=True, env=environment, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.decode() == "Error: names, passwords and versions must be UTF-8\n"
