"""Help pages of raftkvctl beside etcdctl's: options, defaults, environment variables, examples."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

import click
import pytest

from raftkv.cli.command import Branch, Leaf
from raftkv.cli.ctl.tree import GLOBAL_FLAGS, make_tree
from tests.cli.runner import run_ctl, run_server
from tests.long import long_except
from tests.procs import find_tool

WIDTH = 80
COMPARED = [
    "get", "put", "del", "watch", "lock", "elect", "compaction", "make-mirror", "lease timetolive", "check perf",
    "endpoint hashkv", "member list", "user add", "user get", "user passwd", "role grant-permission",
    "role revoke-permission", "defrag", "snapshot status", "snapshot restore",
]  # fmt: skip


def page(command: str) -> str:
    ran = run_ctl([*command.split(), "--help"])
    assert (ran.code, ran.errors) == (0, "")
    return ran.output.decode()


def options_of(text: str) -> dict[str, str]:
    """Name to default of the options between two headings; a wrapped line belongs to the one before."""
    found: dict[str, str] = {}
    for row in re.split(r"\n(?=  (?:-\w, )?--)", text):
        if name := re.search(r"--([a-z-]+)", row):
            default = re.search(r"default:\s+([^;\]]*)", " ".join(row.split()))
            found[name.group(1)] = default.group(1) if default else ""
    return found


def etcdctl_options(command: str) -> dict[str, str]:
    done = subprocess.run(
        [find_tool("etcdctl"), *command.split(), "--help"], capture_output=True, text=True, check=True
    )
    own = done.stdout.partition("OPTIONS:\n")[2].partition("GLOBAL OPTIONS:")[0]
    rows = re.findall(r'--([a-z-]+)(?:\[=|=)"?(.*?)"?\]?\t', own)
    return {name: "" if default == "false" else default for name, default in rows if name != "help"}


@pytest.mark.parametrize("command", long_except(COMPARED, COMPARED[::3]))
def test_options_and_defaults_are_those_of_etcdctl(command: str) -> None:
    ours = options_of(page(command).partition("Options:\n")[2].partition("\n\nExample")[0])
    theirs = etcdctl_options(command)
    assert {name: ours.get(name) for name in theirs} == theirs


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("watch a --max-value-bytes=x", "--max-value-bytes must be a whole number (set to 'x')"),
        ("watch a --keys-only=x", "--keys-only must be true or false (set to 'x')"),
        ("get a --max-staleness=x", "--max-staleness must be a duration such as 300ms, 1.5s or 2m (set to 'x')"),
    ],
)
def test_flags_of_no_etcdctl_say_what_they_take(words: str, wanted: str) -> None:
    assert run_ctl(words.split()).errors == f"Error: {wanted}\n"


def leaves(branch: Branch, path: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, child in branch.commands.items():
        if isinstance(child, Branch):
            yield from leaves(child, f"{path}{name} ")
        else:
            yield f"{path}{name}", child


LEAVES = dict(leaves(make_tree()))


@pytest.mark.parametrize("command", [name for name, leaf in LEAVES.items() if isinstance(leaf, Leaf)])
def test_a_page_has_its_own_options_first_an_example_and_the_way_to_the_global_ones(command: str) -> None:
    text = page(command)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert not re.search(r"(\w-|-\w,)$", text, re.MULTILINE), "a flag is broken into two lines"
    own, _, rest = text.partition("\n\nExample")
    assert f"  raftkvctl {command}" in rest
    assert "--endpoints" not in own
    assert "--endpoints is ETCDCTL_ENDPOINTS" in " ".join(rest.split())
    assert "`raftkvctl options`" in " ".join(rest.split())
    leaf = LEAVES[command]
    assert isinstance(leaf, Leaf)
    for flag in leaf.own:
        assert flag.usage, f"--{flag.name} of {command} is not described"


def test_global_options_are_described_with_default_and_variable() -> None:
    text = run_ctl(["options"]).output.decode()
    assert max(map(len, text.splitlines())) <= WIDTH
    joined = " ".join(text.split())
    for flag in GLOBAL_FLAGS:
        assert f"environment: {flag.variable}" in joined
    assert "default: 127.0.0.1:2379" in joined
    assert "default: 5s" in joined


@pytest.mark.parametrize(
    "branch", ["run", "checkpoint", "member", "lease", "endpoint", "alarm", "downgrade", "check", "bench"]
)
def test_an_unknown_command_of_a_group_is_refused(branch: str) -> None:
    ran = run_ctl([branch, "foo"])
    assert (ran.code, ran.output) == (1, b"")
    assert ran.errors == f'Error: unknown command "foo" for "raftkvctl {branch}"; see raftkvctl {branch} --help\n'
    assert run_ctl([branch]).code == 0


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["putt"], 'unknown command "putt" for "raftkvctl bench" (did you mean put?)'),
        (["put", "--client", "3"], "unknown flag: --client (did you mean --clients?)"),
        (["put", "--clients", "0"], "--clients must be a whole number, 1 or more (set to '0')"),
        (["put", "--clients", "many"], "--clients must be a whole number, 1 or more (set to 'many')"),
        (["mixed", "--read-share", "nan"], "--read-share must be a number from 0 to 1 (set to 'nan')"),
        (["txn-put", "--txn-ops", "129"], "--txn-ops must be a whole number from 1 to 128 (set to '129')"),
    ],
)
def test_words_that_bench_does_not_know_are_refused(words: list[str], error: str) -> None:
    ran = run_ctl(["bench", *words])
    assert (ran.code, ran.output, ran.errors) == (1, b"", f"Error: {error}\n")


@pytest.mark.parametrize("command", ["join", "cluster", "certs", "doctor", "backup", "torchft-lighthouse", "serve"])
def test_help_of_a_command_of_the_server_is_its_page(command: str) -> None:
    asked, named = run_server(["help", command]), run_server([command, "--help"])
    assert (asked.code, asked.output, asked.errors) == (0, named.output, "")


def test_words_that_the_server_does_not_know_are_refused() -> None:
    assert run_server(["help", "jion"]).errors == "raftkv: 'jion' is not a valid flag or command; see raftkv --help\n"


def test_a_command_of_another_program_is_named_with_its_program() -> None:
    assert run_ctl(["doctor"]).errors == 'Error: unknown command "doctor" for "raftkvctl": it is a command of raftkv\n'
    assert run_server(["get", "a"]).errors == "raftkv: 'get' is a command of raftkvctl, not of raftkv\n"
    assert run_server(["hashkv", "a"]).errors == "raftkv: 'hashkv' is a command of raftkvutl, not of raftkv\n"
    assert "join: the URL of a member comes first" in run_server(["join"]).errors
    assert run_server(["version", "x"]).errors == "raftkv: 'x' is not a valid flag\n"


def test_help_about_no_command_says_so() -> None:
    """etcdctl says so too, above its page; that page alone told nothing of the mistake."""
    ran = run_ctl(["help", "memebr"])
    assert (ran.code, ran.output) == (1, b"")
    assert ran.errors.startswith('Error: unknown command "memebr" for "raftkvctl"')
