"""raftkvutl as a program: help, versions, completion, exit codes."""

from __future__ import annotations

import pytest

from raftkv import __version__
from raftkv.cli.command import Leaf
from raftkv.cli.program import CommandError
from raftkv.cli.utl.files import Cell, rendered
from raftkv.cli.utl.tree import make_tree
from tests.cli.runner import run_utl
from tests.cli.test_help import leaves
from tests.cli.test_programs import run

LEAVES = dict(leaves(make_tree()))
WIDTH = 80


def test_version() -> None:
    assert run("raftkvutl", "version").stdout == f"raftkvutl version: {__version__}\nAPI version: 3.7\n"


@pytest.mark.parametrize("command", LEAVES)
def test_a_page_has_its_options_and_an_example(command: str) -> None:
    ran = run_utl([*command.split(), "--help"])
    assert (ran.code, ran.errors) == (0, "")
    text, leaf = ran.output.decode(), LEAVES[command]
    assert max(map(len, text.splitlines())) <= WIDTH
    assert f"  raftkvutl {command}" in text.partition("Example")[2]
    assert "-w, --write-out WORD" in text
    assert isinstance(leaf, Leaf)
    assert all(f"--{flag.name}" in text and flag.usage for flag in leaf.own)


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        ("bogus", 1, 'unknown command "bogus" for "raftkvutl"; see raftkvutl --help'),
        ("version --bogus", 1, "unknown flag: --bogus"),
        ("completion", 1, "accepts 1 arg(s), received 0"),
        ("completion tcsh", 128, 'unknown shell "tcsh": one of bash, zsh, fish, powershell'),
    ],
)
def test_bad_words_are_one_line(words: str, code: int, line: str) -> None:
    ran = run_utl(words.split())
    assert (ran.code, ran.output, ran.errors) == (code, b"", f"Error: {line}\n")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "powershell"])
def test_completion_scripts(shell: str) -> None:
    ran = run_utl(["completion", shell])
    assert (ran.code, b"_RAFTKVUTL_COMPLETE" in ran.output) == (0, True)


def test_completion_offers_commands() -> None:
    done = run("raftkvutl", _RAFTKVUTL_COMPLETE="bash_complete", COMP_WORDS="raftkvutl ver", COMP_CWORD="1")
    assert "version" in done.stdout


CELLS = [Cell("hash", "Hash", "hash", 255, "ff"), Cell("hashRevision", "Hash revision", "hash revision", 7)]


@pytest.mark.parametrize(
    ("write_out", "text"),
    [
        ("simple", "ff, 7"),
        ("fields", '"Hash" : 255\n"Hash revision" : 7'),
        ("json", '{"hash":255,"hashRevision":7}'),
        ("table", "+------+---------------+\n| HASH | HASH REVISION |\n+------+---------------+\n"
         "|   ff |             7 |\n+------+---------------+"),
    ],
)  # fmt: skip
def test_formats(write_out: str, text: str) -> None:
    assert rendered(write_out, CELLS) == text


@pytest.mark.parametrize(
    ("write_out", "line"),
    [("protobuf", "protobuf not supported as output format"), ("yaml", "unsupported output format")],
)
def test_formats_that_cannot_be(write_out: str, line: str) -> None:
    with pytest.raises(CommandError, match=line) as caught:
        rendered(write_out, CELLS)
    assert caught.value.code == 4
