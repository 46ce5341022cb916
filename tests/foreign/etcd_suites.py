"""etcd's own suites, run against raftkv: its functional tester, its end-to-end tests, those of its wire and Go client.

    $ apt-get install golang-go golang-etcd-server-dev     # the suites of etcd 3.4, and what they are built with
    $ python -m tests.foreign.etcd_suites functional       # kills, black holes, delays; then hashes and leases
    $ python -m tests.foreign.etcd_suites e2e --run 'TestCtlV3Lease|TestV3Curl'
    $ python -m tests.foreign.etcd_suites integration --proxy      # through etcd's gRPC proxy; without it, directly

The functional tester starts three members through agents of its own, puts a proxy before each peer port, writes, breaks
something, mends it, and compares hashes and leases. The end-to-end tests start `etcd` and type `etcdctl`: here both
are raftkv's programs, or the second is another by `--etcdctl`. Each test runs alone, because a failed one leaves
members. The integration tests start members inside their own process; `etcd_members/members.go` takes the place of the
package that does, with processes of raftkv, a bridge before each client port and one before each peer port.

Run by hand: CI installs neither Go nor these sources. `LEFT_OUT` says what does not fit raftkv, and why.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click
import yaml

SOURCES: Final = Path("/usr/share/gocode")
"""Where Debian puts the sources of Go packages."""
PACKAGE: Final = "go.etcd.io/etcd"
PROGRAMS: Final = Path(sys.executable).parent
READY: Final = ('"enabled capabilities for version", "published"', '"ready to serve client requests"')
"""What the tests wait for in a member's log: two lines of etcd 3.4, and the one of raftkv and of etcd 3.5."""
MEMBERS: Final = Path(__file__).parent / "etcd_members" / "members.go"
PACKAGES: Final = {
    "integration": "integration",
    "clientv3": "clientv3/integration",
    "ordering": "clientv3/ordering",
    "concurrency": "clientv3/concurrency",
    "examples": "clientv3",
}
INTEGRATION_FILES: Final = (
    "util_test.go",
    "network_partition_test.go",
    "metrics_test.go",
    "main_test.go",
    "logger_test.go",
)
CASE_LIMIT_S: Final = 240
TEST_LIMIT_S: Final = 180

LEFT_OUT: Final = {
    r"V2|Migrate": "etcd's old API, version 2, and its data",
    r"Proxy|proxy|Gateway": "etcd's proxies are programs of their own and work before any server",
    r"ReleaseUpgrade": "needs an older etcd's program",
    r"TestCluster": "covers the tests themselves",
    r"ExampleConfig": "needs a file that Debian's sources lack",
    r"TestCtlV3Alarm$": "of a false health etcd 3.4 tells no reason; raftkv does, as etcd 3.5",
    r"TestCtlV3(Auth)?Snapshot(JWT)?$": "counts what etcd 3.4 keeps beside keys among the keys of a snapshot",
    r"StatusBeforeRestore|Issue6361": "wants a line that etcd 3.4 logs while it restores",
    r"TestCtlV3Version$|CipherSuitesValid$|TestV3Metrics": "wants the version of etcd 3.4",
    r"MaxStreams_ReachLimit": "etcd's JSON gateway is one connection, so that all streams through it share its limit",
    r"MissiongLeaderKey": "the members of an error are in the order of etcd 3.4; raftkv has that of etcd 3.5",
    r"TestEtcdPeer(CN|Name)Auth$": "waits for a line that Go's TLS logs",
    r"TestEtcdCorruptHash$": "writes the database as a file of bbolt while the member is away",
    r"TestCtlV3AuthLeaseRevoke$": "wants a line that the Go client of etcd 3.4 logs",
}

INTEGRATION_LEFT_OUT: Final = {
    r"TestV3CorruptAlarm|SnapshotErrorInflight": "writes the database as a file of bbolt",
    r"DefragDebugging$": "a metric of etcd 3.4 that later ones lack",
    r"ProgressNotify(NoEvent)?$": "sets an interval inside the process",
    r"LeaseCheckpoint$": "sets an interval that has no flag",
    r"TestV3LeasePrmote$": "a lease keeps its time over a change of leader; etcd begins it anew",
    r"TestV3LeaseFailover$": "wants a leader that is cut off to keep a lease alive; raftkv's asks a quorum first",
    r"LeaseRevokeWithRoot": "asks for a lease without a user; raftkv requires a user",
    r"TestV3AuthRestartMember$": "looks for the leader without a user",
    r"WatchRestoreSnapshotUnsync$": "wants a snapshot for ten entries; raftkv keeps more of its log",
    r"TestWatchFragment": "counts answers; raftkv divides them between revisions unasked",
    r"DropReadUnderNetworkPartition$": "a read fails if the leader changes; raftkv asks the next one",
    r"BalancerSupportLearner$": "the code of what learners refuse is that of etcd 3.6, and not repeated",
}

CASES: Final = (
    "SIGTERM_ONE_FOLLOWER", "SIGTERM_LEADER", "SIGTERM_QUORUM", "SIGTERM_ALL",
    "SIGTERM_ONE_FOLLOWER_UNTIL_TRIGGER_SNAPSHOT", "SIGQUIT_AND_REMOVE_ONE_FOLLOWER", "SIGQUIT_AND_REMOVE_LEADER",
    "BLACKHOLE_PEER_PORT_TX_RX_ONE_FOLLOWER", "BLACKHOLE_PEER_PORT_TX_RX_LEADER", "BLACKHOLE_PEER_PORT_TX_RX_QUORUM",
    "BLACKHOLE_PEER_PORT_TX_RX_ALL", "DELAY_PEER_PORT_TX_RX_LEADER", "RANDOM_DELAY_PEER_PORT_TX_RX_QUORUM",
    "RANDOM_DELAY_PEER_PORT_TX_RX_ALL", "NO_FAIL_WITH_STRESS", "NO_FAIL_WITH_NO_STRESS_FOR_LIVENESS",
)  # fmt: skip
"""Cases of the functional tester. Those with a snapshot that is restored let etcd's library write a data directory."""


@click.group(help=(__doc__ or "").partition("\n")[0])
def main() -> None:
    """Choose a suite."""


@main.command()
@click.option("--case", "cases", multiple=True, default=CASES, help="of the tester; may be given several times")
@click.option("--qps", default=600, help="requests a second")
def functional(cases: tuple[str, ...], qps: int) -> None:
    """Run etcd's functional tester: three members under its agents, one case after another."""
    with tempfile.TemporaryDirectory(prefix="raftkv-functional-") as name:
        home = Path(name)
        agent = _build(home, f"{PACKAGE}/functional/cmd/etcd-agent")
        tester = _build(home, f"{PACKAGE}/functional/cmd/etcd-tester")
        failed = [case for case in cases if not _passes(home, agent, tester, case, qps)]
    if failed:
        raise click.ClickException(f"{len(failed)} of {len(cases)} cases failed: {', '.join(failed)}")


@main.command()
@click.option("--run", "pattern", default="TestCtlV3|TestEtcd|TestV3", help="regular expression for names of tests")
@click.option("--etcdctl", default=str(PROGRAMS / "raftkvctl"), help="program that is typed as etcdctl")
@click.option("--patience", default=1, help="factor for the time that one test of etcdctl may take")
def e2e(pattern: str, etcdctl: str, patience: int) -> None:
    """Run etcd's end-to-end tests, each alone: `etcd` and `etcdctl` are raftkv's programs."""
    with tempfile.TemporaryDirectory(prefix="raftkv-e2e-") as name:
        home = Path(name)
        program = _build_e2e(home, patience)
        (home / "integration").mkdir()
        (home / "integration" / "fixtures").symlink_to(SOURCES / "src" / PACKAGE / "integration" / "fixtures")
        _write_programs(home / "bin", etcdctl)
        listed = subprocess.run([program, "-test.list", pattern], capture_output=True, text=True, check=True).stdout
        chosen = [test for test in listed.split() if not any(re.search(left, test) for left in LEFT_OUT)]
        failed = [test for test in chosen if not _passes_alone(home, program, test, patience)]
    if failed:
        raise click.ClickException(f"{len(failed)} of {len(chosen)} tests failed: {', '.join(failed)}")


@main.command()
@click.option("--package", "packages", multiple=True, default=tuple(PACKAGES), type=click.Choice(tuple(PACKAGES)))
@click.option("--run", "pattern", default="Test|Example", help="regular expression for names of tests")
@click.option("--proxy", is_flag=True, help="clients reach members through etcd's gRPC proxy and its namespaces")
def integration(packages: tuple[str, ...], pattern: str, proxy: bool) -> None:
    """Run etcd's integration tests of the wire and of its Go client, each alone, on raftkv's processes."""
    with tempfile.TemporaryDirectory(prefix="raftkv-int-") as name:
        home = Path(name)
        tree = _copy_integration(home)
        failed = []
        for package in packages:
            program = home / f"{package.replace('/', '-')}.test"
            tags = ["-tags", "cluster_proxy"] if proxy else []
            _go(home, "test", "-vet=off", *tags, "-c", "-o", str(program), f"{PACKAGE}/{PACKAGES[package]}")
            folder, left_out = tree / PACKAGES[package], INTEGRATION_LEFT_OUT
            words = [str(program), "-test.list", pattern]
            environment = _environment(home)
            listed = subprocess.run(
                words, cwd=folder, env=environment, capture_output=True, text=True, check=True
            ).stdout
            chosen = [test for test in listed.split() if not any(re.search(left, test) for left in left_out)]
            failed += [test for test in chosen if not _passes_in(home, folder, [str(program)], test, 1)]
    if failed:
        raise click.ClickException(f"{len(failed)} tests failed: {', '.join(failed)}")


def _environment(home: Path) -> dict[str, str]:
    return {**os.environ, "RAFTKV_PROGRAM": str(PROGRAMS / "raftkv"), "TMPDIR": str(home)}


def _copy_integration(home: Path) -> Path:
    """Lay our members where etcd's tests import its own, and the tests beside them; return the root of the packages."""
    tree = home / "go" / "src" / PACKAGE
    etcd = SOURCES / "src" / PACKAGE
    ours = tree / "integration"
    ours.mkdir(parents=True)
    shutil.copy(MEMBERS, ours)
    for pattern in ("v3*_test.go", "bridge.go", "cluster_[dp]*.go", *INTEGRATION_FILES):
        for path in (etcd / "integration").glob(pattern):
            shutil.copy(path, ours)
    for fixtures in ("fixtures", "fixtures-expired"):
        shutil.copytree(etcd / "integration" / fixtures, ours / fixtures)
    _replace(ours / "bridge.go", "newBridge(addr string)", "newBridge(addr, to string)")
    _replace(ours / "bridge.go", "outaddr:    addr,", "outaddr:    to,")
    _replace(ours / "bridge.go", 'net.Dial("unix", b.outaddr)', 'net.Dial("tcp", b.outaddr)')
    shutil.copytree(etcd / "clientv3", tree / "clientv3")
    return tree


def _build(home: Path, package: str) -> Path:
    program = home / package.rpartition("/")[2]
    _go(home, "build", "-o", str(program), package)
    return program


def _build_e2e(home: Path, patience: int) -> Path:
    """Build the tests from a copy, in which a test of etcdctl has more time: programs of Python start more slowly."""
    copy = home / "go" / "src" / "e2e"
    shutil.copytree(SOURCES / "src" / PACKAGE / "tests" / "e2e", copy)
    limit = "timeout = {}*cx.dialTimeout"
    _replace(copy / "ctl_v3_auth_no_proxy_test.go", "time.After(60 *", f"time.After({60 * patience} *")
    _replace(copy / "ctl_v3_test.go", limit.format(2), limit.format(2 * patience))
    _replace(copy / "etcd_process.go", *READY)
    program = home / "e2e.test"
    _go(home, "test", "-c", "-o", str(program), "e2e")
    return program


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    if old not in text:
        raise click.ClickException(f"{path.name} is not that of etcd 3.4: it lacks {old!r}")
    path.write_text(text.replace(old, new), encoding="utf-8")


def _go(home: Path, *words: str) -> None:
    environment = {**os.environ, "GO111MODULE": "off", "GOPATH": f"{home / 'go'}:{SOURCES}"}
    try:
        done = subprocess.run(["go", *words], env=environment, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise click.ClickException("go is missing: apt-get install golang-go golang-etcd-server-dev") from None
    if done.returncode:
        raise click.ClickException(f"go {' '.join(words)}: {done.stderr.strip()[-1000:]}")


def _write_programs(folder: Path, etcdctl: str) -> None:
    folder.mkdir(parents=True)
    for name, program in (("etcd", PROGRAMS / "raftkv"), ("etcdctl", etcdctl)):
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec {program} "$@"\n', encoding="utf-8")
        path.chmod(0o755)


def _passes_alone(home: Path, program: Path, test: str, patience: int) -> bool:
    folder = home / "tests" / "e2e"
    folder.mkdir(parents=True, exist_ok=True)
    words = [str(program), "-bin-dir", str(home / "bin"), "-cert-dir", str(home / "integration" / "fixtures")]
    return _passes_in(home, folder, words, test, patience)


def _passes_in(home: Path, folder: Path, words: list[str], test: str, patience: int) -> bool:
    words = [*words, f"-test.run=^{test}$", "-test.v"]
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    running = subprocess.Popen(words, cwd=folder, env=_environment(home), stdout=pipe, stderr=both, text=True)
    try:
        output, _ = running.communicate(timeout=TEST_LIMIT_S * patience)
    except subprocess.TimeoutExpired:
        running.kill()
        output, _ = running.communicate()
    finally:
        _end_members(home)
    passed = running.returncode == 0
    click.echo(f"{'passed' if passed else 'FAILED'} {test}")
    if not passed:
        click.echo("".join(f"    {line[:500]}\n" for line in output.splitlines()[-12:]), nl=False)
    return passed


def _end_members(home: Path) -> None:
    """Kill what a test has left: members have terminals of their own, so no signal of its end reaches them."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            ours = os.readlink(process / "cwd").startswith(str(home))
        except OSError:
            continue
        if ours:
            os.kill(int(process.name), signal.SIGKILL)


def _passes(home: Path, agent: Path, tester: Path, case: str, qps: int) -> bool:
    data = home / "data"
    shutil.rmtree(data, ignore_errors=True)
    config = home / "functional.yaml"
    config.write_text(yaml.safe_dump(_config(data, tester, case, qps)), encoding="utf-8")
    agents = []
    try:
        for member in (1, 2, 3):
            (data / f"m{member}").mkdir(parents=True)
            words = [str(agent), "-network", "tcp", "-address", f"127.0.0.1:{member}9027"]
            agents.append(subprocess.Popen(words, cwd=home, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        words = [str(tester), "-config", str(config)]
        done = subprocess.run(words, cwd=home, capture_output=True, text=True, check=False, timeout=CASE_LIMIT_S)
        passed, reasons = done.returncode == 0, list(_errors(done.stderr))
    except subprocess.TimeoutExpired:
        passed, reasons = False, [f"no end after {CASE_LIMIT_S} s"]
    finally:
        for process in agents:
            process.kill()
            process.wait()
        _end_members(home)
    click.echo(f"{'passed' if passed else 'FAILED'} {case}")
    if not passed:
        click.echo("".join(f"    {line}\n" for line in reasons[-5:]), nl=False)
    return passed


def _errors(log: str) -> Iterator[str]:
    for line in log.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if "error" in record and record["level"] in {"warn", "error", "fatal"}:
            yield f"{record['msg']}: {record['error']}"


def _config(data: Path, tester: Path, case: str, qps: int) -> dict[str, Any]:
    weights = {
        "KV_WRITE_SMALL": 0.35, "KV_WRITE_LARGE": 0.002, "KV_READ_ONE_KEY": 0.07, "KV_READ_RANGE": 0.07,
        "KV_DELETE_ONE_KEY": 0.07, "KV_DELETE_RANGE": 0.07, "KV_TXN_WRITE_DELETE": 0.35, "LEASE": 0.1,
    }  # fmt: skip
    return {
        "agent-configs": [_member(data, member) for member in (1, 2, 3)],
        "tester-config": {
            "data-dir": str(data / "tester"),
            "network": "tcp",
            "addr": "127.0.0.1:9028",
            "delay-latency-ms": 5000,
            "delay-latency-ms-rv": 500,
            "updated-delay-latency-ms": 5000,
            "round-limit": 1,
            "exit-on-failure": True,
            "case-delay-ms": 4000,
            "cases": [case],
            "runner-exec-path": str(tester),
            "stressers": [{"type": kind, "weight": weight} for kind, weight in weights.items()],
            "checkers": ["KV_HASH", "LEASE_EXPIRE"],
            "stress-key-size": 100,
            "stress-key-size-large": 32769,
            "stress-key-suffix-range": 250_000,
            "stress-key-suffix-range-txn": 100,
            "stress-key-txn-ops": 10,
            "stress-clients": 50,
            "stress-qps": qps,
        },
    }


def _member(data: Path, member: int) -> dict[str, Any]:
    home = data / f"m{member}"
    client, peer, proxied = (f"https://127.0.0.1:{member}{port}" for port in (1379, 1380, 1381))
    return {
        "etcd-exec": str(PROGRAMS / "raftkv"),
        "agent-addr": f"127.0.0.1:{member}9027",
        "failpoint-http-addr": f"http://127.0.0.1:738{member}",
        "base-dir": str(home),
        "etcd-client-proxy": False,
        "etcd-peer-proxy": True,
        "etcd-client-endpoint": f"127.0.0.1:{member}1379",
        "snapshot-path": str(home / "snapshot.db"),
        "etcd": {
            "name": f"s{member}",
            "data-dir": str(home / "etcd.data"),
            "wal-dir": str(home / "etcd.data" / "member" / "wal"),
            "heartbeat-interval": 100,
            "election-timeout": 1000,
            "listen-client-urls": [client],
            "advertise-client-urls": [client],
            "auto-tls": True,
            "listen-peer-urls": [peer],
            "initial-advertise-peer-urls": [proxied],
            "peer-auto-tls": True,
            "initial-cluster": ",".join(f"s{other}=https://127.0.0.1:{other}1381" for other in (1, 2, 3)),
            "initial-cluster-state": "new",
            "initial-cluster-token": "functional",
            "snapshot-count": 2000,
            "quota-backend-bytes": 8_000_000_000,
            "pre-vote": True,
            "initial-corrupt-check": True,
            "logger": "zap",
            "log-outputs": [str(home / "etcd.log")],
            "log-level": "info",
        },
    }


if __name__ == "__main__":
    main()
