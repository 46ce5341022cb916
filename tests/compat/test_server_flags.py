"""The server's flags beside real etcd 3.5.1: the same refusals with the same exit codes, the same ids."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import grpc
import pytest

from raftkv import cluster_id
from raftkv.cli.server_options import read_options
from raftkv.pb import rpc_pb2
from tests.cli.runner import run_server
from tests.long import long_except
from tests.procs import ETCD_FAST, Cluster, find_tool

TIMEOUT_S = 90.0

REFUSED = [
    "--nothing",
    "-nothing=1",
    "--name",
    "--name=a extra",
    "--pre-vote false",
    "--pre-vote=maybe",
    "--heartbeat-interval=x",
    "--heartbeat-interval=-1",
    "--heartbeat-interval=1.5",
    "--heartbeat-interval=0",
    "--election-timeout=100",
    "--election-timeout=60000",
    "--backend-batch-interval=5",
    "--quota-backend-bytes=0x10zz",
    "--quota-backend-bytes=99999999999999999999",
    "--listen-client-urls=abc",
    "--listen-client-urls=http://127.0.0.1",
    "--listen-client-urls=http://127.0.0.1:1/path",
    "--listen-client-urls=http://127.0.0.1:23999",
    "--listen-client-urls=http://example.org:23999 --advertise-client-urls=http://example.org:1",
    "--initial-cluster-state=old",
    "--auto-compaction-mode=daily",
    "--config-file=/nowhere/etcd.yml",
    "---x",
    "--=x",
]


def run_etcd(words: list[str], directory: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Exit code and what it said, without the log's wrapping."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ETCD")}
    done = subprocess.run(
        [find_tool("etcd"), *words],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=directory,
        env={**inherited, **environment},
        check=False,
    )
    lines = []
    for line in done.stderr.split("\n"):
        record = json.loads(line) if line.startswith("{") else {"error": line}
        lines.append(record.get("error") or record.get("msg", ""))
    return done.returncode, "\n".join(lines)


@pytest.mark.parametrize("text", long_except(REFUSED, REFUSED[::3]))
def test_refused_alike(tmp_path, text):
    words = text.split()
    code, said = run_etcd(words, tmp_path, {})
    ran = run_server(words)
    assert ran.code == code != 0
    assert ran.errors.startswith("raftkv: ")
    assert ran.errors.count("\n") == 1
    # etcd prints its help next, raftkv what to do.
    theirs, _, advice = ran.errors.removeprefix("raftkv: ").strip().partition("; ")
    assert theirs.lower() in said.lower()
    assert not advice or advice.startswith(("give ", "see "))


@pytest.mark.parametrize(
    ("words", "environment"),
    [
        (["--name=a"], {"ETCD_NAME": "b"}),
        ([], {"ETCD_HEARTBEAT_INTERVAL": "abc"}),
        ([], {"ETCD_CONFIG_FILE": "/nowhere/etcd.yml"}),
        ([], {"ETCD_LISTEN_CLIENT_URLS": "http://127.0.0.1:1"}),
    ],
)
def test_environment_refused_alike(tmp_path, words, environment):
    code, said = run_etcd(words, tmp_path, environment)
    ran = run_server(words, environment)
    assert (ran.code, ran.errors.count("\n")) == (code, 1) == (1, 1)
    # etcd's line about a conflict has one parenthesis too many.
    assert ran.errors.removeprefix("raftkv: ").split("(")[0].replace(next(iter(environment)), "").split()[0] in said


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 3])
def test_ids(size):
    with Cluster(ETCD_FAST, size=size, flags=["--initial-cluster-token=somewhere"]) as cluster:
        members = {}
        for endpoint in cluster.endpoints:
            with grpc.insecure_channel(endpoint) as channel:
                raw = channel.unary_unary("/etcdserverpb.Maintenance/Status")(b"")
            header = rpc_pb2.StatusResponse.FromString(raw).header
            members[endpoint] = (header.member_id, header.cluster_id)
        for member in cluster.members:
            config = read_options(
                [
                    f"--name={member.name}",
                    f"--initial-cluster={member.initial_cluster}",
                    f"--initial-advertise-peer-urls={member.peer_url}",
                    "--initial-cluster-token=somewhere",
                ],
                {},
            ).config
            config.check_bootstrap()
            expected = (config.member_id, cluster_id.cluster_id(config.founding_members()))
            assert members[member.endpoint] == expected
