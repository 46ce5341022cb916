"""Command lines, environment and configuration files of the three programs, up to the moment when they would act."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from raftkv.cli import command
from raftkv.cli.ctl import tree as ctl
from raftkv.cli.program import CommandError
from raftkv.cli.server_options import FLAGS, read_options
from raftkv.cli.utl import tree as utl
from tests.fuzz.target import Parse, Target


def _words(data: bytes) -> list[str]:
    """Input: words with zeros between them, as the kernel has them."""
    return [word.decode("utf-8", "surrogateescape") for word in data.split(b"\0")[:40]]


def _serve(directory: Path) -> Parse:
    def parse(data: bytes) -> None:
        words, _, environment = data.partition(b"\n")
        variables = dict(word.partition("=")[::2] for word in _words(environment) if word)
        variables.pop("ETCD_CONFIG_FILE", None)
        if not any(word.lstrip("-").startswith("config-file") for word in _words(words)):
            read_options(_words(words), variables)

    return parse


def _file(directory: Path) -> Parse:
    path = directory / "config.yaml"

    def parse(data: bytes) -> None:
        path.write_bytes(data[:FILE_BYTES])
        read_options([f"--config-file={path}"], {})

    return parse


def _act(invocation: command.Invocation) -> None:
    """In place of what a command does."""


def _program(make_tree: Callable[[], Any]) -> Parse:
    """Any command, which does nothing once its words are read."""

    def parse(data: bytes) -> None:
        output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="surrogateescape")
        with (
            mock.patch.object(command, "imported", return_value=_act),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
        ):
            command.dispatch(make_tree(), _words(data))

    return parse


FILE_BYTES = 8192
"""What PyYAML reads in a second, traced."""

SERVE = (
    b"--name\0a\0--listen-client-urls=http://127.0.0.1:1\0--advertise-client-urls\0http://127.0.0.1:1"
    b"\0--quota-backend-bytes=0x10\0--heartbeat-interval=100\0--cors=a,b\nETCD_DATA_DIR=/tmp/x\0ETCD_DEBUG=true"
)
YAML = b"""name: a
data-dir: /tmp/x
listen-client-urls: http://127.0.0.1:1
advertise-client-urls: http://127.0.0.1:1
quota-backend-bytes: 100000
client-transport-security: {cert-file: c, key-file: k, client-cert-auth: false}
log-outputs: [stderr]
"""
YAML_TOKENS = (
    b": ", b"&a ", b"*a", b"!!python/object/apply:os.system ['id']", b"- ", b"{}", b"<<: ", b"~", b"2026-01-01",
)  # fmt: skip
CTL = [
    b"--endpoints=a,b\0get\0key\0--prefix\0--rev=5",
    b"put\0--lease\0abc\0k\0v",
    b"lease\0grant\0100\0-w=json",
    b"endpoint\0status\0--cluster",
    b"--user=a:b\0txn\0-i",
    b"lock\0name\0--\0true",
]
UTL = [b"snapshot\0status\0file\0-w\0table", b"snapshot\0restore\0f\0--data-dir=x\0--initial-cluster=a=http://b:1"]
FLAG_TOKENS = tuple(f"--{name}=".encode() for name in sorted(FLAGS))
TARGETS = (
    Target(
        "serve-flags", _serve, lambda: [SERVE, b"--version", b"--help"], (CommandError,), tokens=(b"\0", *FLAG_TOKENS)
    ),
    Target("config-file", _file, lambda: [YAML, b"{}"], (CommandError,), tokens=(b"\n", *YAML_TOKENS), examples=60),
    Target(
        "ctl-words",
        lambda directory: _program(ctl.make_tree),
        lambda: CTL,
        (CommandError,),
        tokens=(b"\0", b"\0--", b"=", b"--help", b"-w", b"--consistency=s"),
        examples=40,
    ),
    Target(
        "utl-words",
        lambda directory: _program(utl.make_tree),
        lambda: UTL,
        (CommandError,),
        tokens=(b"\0", b"\0--", b"=", b"--help"),
        examples=40,
    ),
)
