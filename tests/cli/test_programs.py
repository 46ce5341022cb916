"""The installed programs: entry points, exit codes, start-up, completion; no traceback ever."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from raftkv import __version__
from raftkv.cli.command import Branch, Leaf
from raftkv.cli.ctl import tree as ctl_tree
from raftkv.cli.utl import tree as utl_tree
from tests.cli.programs import Running
from tests.cli.runner import run_ctl, run_server, run_utl
from tests.procs import RAFTKV, ROOT, Cluster

BIN = Path(sys.executable).parent
TIMEOUT_S = 90
UNUSED_PORTS = (
    *("--listen-client-urls", "http://127.0.0.1:0", "--advertise-client-urls", "http://127.0.0.1:1"),
    *("--listen-peer-urls", "http://127.0.0.1:0"),
)
"""Flags of a member that does not start, on a machine where the default ports are in use."""


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BIN / words[0]), *words[1:]],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=TIMEOUT_S,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.mark.long
def test_versions():
    assert run("raftkvctl", "version").stdout == f"raftkvctl version: {__version__}\nAPI version: 3.7\n"
    assert run("raftkv", "version").stdout.startswith(f"raftkv Version: {__version__}\nAPI Version: 3.7\n")
    for name in ("raftkv", "raftkvctl", "raftkvutl"):
        assert run(name, "--version").stdout == run(name, "version").stdout


def test_exit_codes_reach_the_shell():
    for words, code in ((("raftkvctl", "get"), 128), (("raftkv", "--nothing"), 2)):
        done = run(*words)
        assert done.returncode == code
        assert done.stderr.count("\n") == 1
        assert "Traceback" not in done.stderr


@pytest.mark.long
def test_raftkvctl_ends_without_taking_its_modules_apart():
    """End at the last word: etcd's end-to-end tests found the process after their cluster, in every second run."""
    code = """
import atexit, sys
from raftkv.cli.start import raftkvctl

class Late:
    def __del__(self):
        print("taken apart", flush=True)

late = Late()
atexit.register(print, "the end", flush=True)
sys.stderr.write("begun")
sys.argv = ["raftkvctl", *sys.argv[1:]]
raftkvctl()
"""
    for words, answer, exit_code in (
        (("version",), f"raftkvctl version: {__version__}\nAPI version: 3.7\n", 0),
        (("get",), "", 128),
    ):
        given = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        done = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True, env=given, check=False
        )
        assert (done.stdout, done.returncode) == (answer + "the end\n", exit_code)
        assert done.stderr.startswith("begun")


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        ("raftkv", "--data-dir", "data", *UNUSED_PORTS),
        ("raftkv", "certs", "tls", "a=10.0.0.1"),
        ("raftkv", "backup", "list", "x"),
    ],
)
def test_a_directory_that_was_deleted_beneath_a_program_is_named(words: tuple[str, ...], tmp_path: Path) -> None:
    """Name the directory that is gone, as of a clone that was moved away, beside the error of the system."""
    gone = tmp_path / "gone"
    gone.mkdir()
    script = f'cd {gone} && rmdir {gone} && exec {BIN}/"$@"'
    done = subprocess.run(
        ["sh", "-c", script, "sh", *words], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    line = "raftkv: the current directory no longer exists: change to another one, then start this again\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", line)


def test_a_reader_that_leaves_early_gets_no_traceback():
    command = f"{BIN}/raftkvctl completion bash; {BIN}/raftkvctl help"
    done = subprocess.run(["bash", "-c", f"({command}) | head -c 1"], capture_output=True, text=True, check=False)
    assert (len(done.stdout), "Traceback" in done.stderr) == (1, False)


def imported_by(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


CLOSED = """
import os, sys
from raftkv.cli.program import leave

def body():
    report = os.open(sys.argv[1], os.O_WRONLY)
    print("not read: \\xe4")
    print("nor this", file=sys.stderr)
    os.write(2, b"the log writes to numbers")
    os.write(report, b"above 2" if report > 2 else b"%d" % report)
    return 7 if sys.stdin.read() == "" and not sys.stdout.isatty() else 1

sys.exit(leave(body, print))
"""


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">&-", "2>&-"])
def test_streams_that_were_closed_at_the_start_do_not_become_files(tmp_path: Path, closed: str) -> None:
    """A shell's ``>&-``: what is opened next would have the number, be written to as output, or fail as None."""
    report = tmp_path / "report"
    report.touch()
    words = ["sh", "-c", f'exec "$0" -c "$1" "$2" {closed}', sys.executable, CLOSED, str(report)]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False, cwd=ROOT)
    assert (done.returncode, report.read_text()) == (7, "above 2"), done.stderr.decode()


@pytest.mark.long
def test_start_up_imports_only_what_is_needed():
    light = imported_by("from raftkv.cli.ctl.__main__ import main; main(['version'])")
    assert not {"asyncio", "google.protobuf", "rich", "yaml", "lmdb"} & light
    client = imported_by("from raftkv.cli.ctl.__main__ import main; main(['get', 'a', '--command-timeout=1ms'])")
    assert not {"rich", "yaml", "lmdb", "cryptography", "multiprocessing", "http.client"} & client
    packages = {name.split(".")[1] for name in client if name.startswith("raftkv.")}
    assert packages == {"checkpoint", "cli", "client", "errors", "lazy", "loop", "pb", "rpc", "urls"}
    assert {name for name in client if name.startswith("raftkv.checkpoint.")} == {"raftkv.checkpoint.keys"}
    assert {name for name in client if name.startswith("raftkv.cli.ctl.")} == {
        f"raftkv.cli.ctl.{name}" for name in ("__main__", "kv", "session", "tree")
    }


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("raftkvctl ", {"get", "put", "del", "txn", "member", "endpoint"}),
        ("raftkvctl endpoint ", {"health", "status", "hashkv"}),
        ("raftkvctl get --pre", {"--prefix"}),
        ("raftkvctl get --order ", {"ASCEND", "DESCEND"}),
        ("raftkvctl --write-out js", {"json"}),
    ],
)
def test_completion(words, offered):
    done = run(
        "raftkvctl", _RAFTKVCTL_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=str(len(words.split(" ")) - 1)
    )
    found = {line.split(",", 1)[1] for line in done.stdout.split("\n") if "," in line}
    assert offered <= found


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "powershell"])
def test_completion_scripts(shell):
    ran = run_ctl(["completion", shell])
    assert (ran.code, b"_RAFTKVCTL_COMPLETE" in ran.output) == (0, True)


def test_completion_of_other_shells():
    complaint = 'Error: unknown shell "tcsh": one of bash, zsh, fish, powershell\n'
    assert run_ctl(["completion", "tcsh"]).errors == complaint
    assert run_ctl(["completion"]).code == 1


@pytest.mark.parametrize("words", [["--help"], ["-h"], [], ["help"], ["help", "get"], ["get", "--help"], ["endpoint"]])
def test_help(words):
    ran = run_ctl(words)
    assert (ran.code, ran.errors) == (0, "")
    assert ran.output.startswith(b"Usage: raftkvctl")


def test_help_of_the_server():
    ran = run_server(["--help"])
    assert (ran.code, b"--listen-client-urls" in ran.output) == (0, True)


def test_unknown_commands():
    assert run_ctl(["gett", "a"]).errors == 'Error: unknown command "gett" for "raftkvctl" (did you mean get?)\n'
    assert run_ctl(["endpoint", "--nothing"]).errors == "Error: unknown flag: --nothing\n"
    assert run_ctl(["get", "a", "--limt", "1"]).errors == "Error: unknown flag: --limt (did you mean --limit?)\n"
    assert run_server(["--nam", "x"]).errors == "raftkv: flag provided but not defined: -nam (did you mean --name?)\n"
    assert run_server(["grpc-proxy", "start"]).errors == "raftkv: grpc-proxy is not implemented in raftkv\n"
    assert run_ctl(["version"], environment={"ETCDCTL_API": "2"}).errors == "Error: unsupported API version: 2\n"


def test_settings_are_shown_as_an_environment_takes_them_without_the_password():
    words = ["get", "a", "--debug", "--user=u", "--password=hidden", "--endpoints=127.0.0.1:1", "--command-timeout=1ms"]
    errors = run_ctl(words).errors
    shown = dict(line.split("=", 1) for line in errors.splitlines() if line.startswith("ETCDCTL_"))
    values = {name: shown[f"ETCDCTL_{name}"] for name in ("ENDPOINTS", "COMMAND_TIMEOUT", "DIAL_TIMEOUT", "DEBUG")}
    assert list(values.values()) == ["127.0.0.1:1", "1ms", "2s", "true"]
    assert "ETCDCTL_PREFIX" not in shown
    assert "hidden" not in errors


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--cert=/nowhere/c.pem", "--key=/nowhere/k.pem"], 128),
        (["--cert=/nowhere/c.pem"], 128),
        (["--cacert=/nowhere/ca.pem"], 128),
        (["--endpoints=:::"], 2),
        (["--endpoints="], 2),
        (["--discovery-srv=example.org"], 1),
    ],
)
def test_connections_that_cannot_be_made(words, code):
    ran = run_ctl(["get", "a", "--command-timeout=100ms", *words])
    assert (ran.code, ran.errors.count("\n")) == (code, 1)


DAEMONS = {
    "torchft-lighthouse": (
        "raftkv torchft-lighthouse: waiting for the cluster: ",
        "torchft lighthouse of job default on ",
    ),
    "tcpstore-gateway": ("the raftkv cluster does not answer, clients wait: ", "TCPStore gateway on "),
}


@pytest.mark.long
@pytest.mark.parametrize("daemon", DAEMONS)
def test_a_daemon_says_that_it_is_ready_when_its_cluster_answers(daemon: str) -> None:
    waits, ready = DAEMONS[daemon]
    with Cluster(RAFTKV) as cluster:
        (endpoint,) = cluster.endpoints
        cluster.members[0].kill()
        command = [str(BIN / "raftkv"), daemon, "--listen", "127.0.0.1:0", "--endpoints", endpoint]
        with Running(command) as program:
            program.wait_complained(waits)
            program.wait_complained(f"from {endpoint}: connect: connection refused")
            assert program.output == b""
            cluster.members[0].restart()
            program.wait_printed(ready.encode())
            assert program.stop().code == 0
        cluster.members[0].kill()
        with Running(command) as program:
            program.wait_complained(waits)
            assert program.stop().code == 0
            assert program.output == b""


PLAIN = [
    (run_server, "cluster --size many", 2, "raftkv: --size must be a whole number (set to 'many')"),
    (run_server, "tcpstore-gateway --linger soon", 2, "raftkv: --linger must be a whole number (set to 'soon')"),
    (run_server, "tcpstore-gateway --fresh=maybe", 2, "raftkv: --fresh must be true or false (set to 'maybe')"),
    (run_server, "torchft-lighthouse --min-replicas 1.5", 2,
     "raftkv: --min-replicas must be a whole number (set to '1.5')"),
    (run_ctl, "top --interval soon", 1,
     "Error: --interval must be a duration such as 300ms, 1.5s or 2m (set to 'soon')"),
    (run_ctl, "run exec --job j --stop-grace 10 -- true", 1,
     "Error: --stop-grace must be a duration such as 300ms, 1.5s or 2m, 0s or more (set to '10')"),
    (run_ctl, "run list --json=maybe", 1, "Error: --json must be true or false (set to 'maybe')"),
    (run_ctl, "get a --limit many", 1,
     'Error: invalid argument "many" for "--limit" flag: strconv.ParseInt: parsing "many": invalid syntax'),
]  # fmt: skip


@pytest.mark.parametrize(("run", "text", "code", "line"), PLAIN, ids=[text for _, text, _, _ in PLAIN])
def test_flags_of_its_own_are_refused_in_plain_words_and_etcdctls_in_etcdctls(run, text, code, line) -> None:
    ran = run(text.split())
    assert (ran.code, ran.output, ran.errors) == (code, b"", f"{line}\n")


def _leaves(branch: Branch, *path: str) -> Iterator[tuple[tuple[str, ...], Leaf]]:
    for name, command in branch.commands.items():
        if isinstance(command, Branch):
            yield from _leaves(command, *path, name)
        elif isinstance(command, Leaf):
            yield (*path, name), command


LEAVES = [
    (run, path, leaf)
    for run, tree in ((run_ctl, ctl_tree.make_tree()), (run_utl, utl_tree.make_tree()))
    for path, leaf in _leaves(tree)
    if "..." not in leaf.usage
]


@pytest.mark.parametrize(("run", "path", "leaf"), LEAVES, ids=[" ".join(path) for _, path, _ in LEAVES])
def test_a_word_too_many_is_refused_in_one_line_before_anything_is_done(run, path, leaf) -> None:
    """The endpoint answers never: what is refused is refused before it is asked."""
    needs = {
        "data-dir": "/nowhere",
        "target-version": "3.6",
        "peer-urls": "http://127.0.0.1:9",
        "endpoints": "127.0.0.1:1",
    }
    flags = [f"--{flag.name}={needs[flag.name]}" for flag in leaf.flags if flag.name in needs]
    words = [str(number) for number in range(1, len(leaf.usage.split()) + 2)]
    ran = run([*path, *words, *flags], environment={})
    assert ran.code in (1, 128), ran
    assert ran.output == b""
    assert ran.errors.startswith("Error: ")
    assert ran.errors.count("\n") == 1
    assert not re.search("deadline|no answer|/nowhere|version", ran.errors)


STRICT = {"PYTHONIOENCODING": "utf-8:strict"}
"""Sets streams as Python has them in any UTF-8 locale but C's."""


@pytest.mark.parametrize("encoding", [STRICT["PYTHONIOENCODING"], "latin-1:strict"])
def test_names_of_files_that_are_no_text_are_printed(tmp_path: Path, encoding: str) -> None:
    """All was made, and then the program ended with a traceback, or as if it had failed."""
    directory = tmp_path / os.fsdecode(b"\xe6\x97\xa5 \xff")
    command = [str(BIN / "raftkv"), "certs", str(directory), "a=127.0.0.1"]
    given = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(command, capture_output=True, env=given, timeout=TIMEOUT_S, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    shown = os.fsencode(directory) if encoding.startswith("utf-8") else str(tmp_path).encode() + b"/\\u65e5 \\udcff"
    assert shown in done.stdout


def test_input_that_is_no_text_is_one_line() -> None:
    done = subprocess.run(
        [str(BIN / "raftkvctl"), "user", "add", "joe", "--interactive=false"],
        capture_output=True,
        input=b"\xff\n",
        env={**os.environ, **STRICT},
        timeout=TIMEOUT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, b"Error: names, passwords and versions must be UTF-8\n")


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        ("--version=maybe", 2, 'invalid boolean value "maybe" for -version: parse error; give true or false'),
        (
            "--horovod-run=\udcff",
            1,
            "--horovod-run '\\udcff' is not a run id: at most 200 bytes, without white space, ",
        ),
        ("join http://a..b:1", 1, "join: cannot find the way to http://a..b:1: "),
    ],
)
def test_odd_words_of_the_server_are_one_line(words: str, code: int, line: str) -> None:
    ran = run_server(words.split(" "))
    assert (ran.code, ran.output, ran.errors.count("\n")) == (code, b"", 1)
    assert ran.errors.startswith(f"raftkv: {line}")


@pytest.mark.long
def test_a_client_url_that_cannot_be_reached_hides_no_other_member() -> None:
    """A member may advertise a socket file, which only its machine has: a traceback, or no answer at all."""
    cluster = Cluster(RAFTKV)
    (member,) = cluster.members
    member.flags = [*member.flags, f"--advertise-client-urls={member.client_url},unix://a:1"]
    with cluster:
        for command in ("endpoint health", "endpoint status", "endpoint hashkv", "defrag"):
            words = [*command.split(), "--cluster", "--command-timeout", "1s"]
            ran = run_ctl([*words, "--endpoints", member.endpoint])
            assert (ran.code, member.endpoint.encode() in ran.output) == (1, True)
            assert "unix://a:1" in ran.errors
        member.kill()
        member.flags[-1] = "--advertise-client-urls=unix://a:1"
        member.start()
        member.wait_ready()
        ran = run_ctl(["top", "--once", "--interval", "1ms", "--endpoints", member.endpoint])
        assert ran.code == 1
        assert b"unix://a:1: no such file or directory" in ran.output


@pytest.mark.parametrize(
    ("raised", "line"),
    [
        ("MemoryError()", r"out of memory \(MemoryError, in raftkv.cli.program line \d+\); give it more memory"),
        ("KeyError('x')", r"KeyError: 'x', in raftkv.cli.program line \d+; report this line"),
        ("ExceptionGroup('two', [AssertionError()])", "AssertionError; report this line"),
        ("OSError(5, 'Input/output error', '/a')", "/a: Input/output error"),
        ("__import__('asyncio').CancelledError()", r"CancelledError, in raftkv.cli.program line \d+; report this line"),
    ],
)
def test_a_bug_or_a_lack_of_memory_ends_a_program_in_one_line(raised: str, line: str) -> None:
    code = f"import sys\nfrom raftkv.cli.program import leave\ndef body():\n    raise {raised}\n"
    code += "sys.exit(leave(body, lambda text: print('raftkvctl:', text, file=sys.stderr)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(f"raftkvctl: {line}\n", done.stderr)
