"""From flags, environment and file to a configuration."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv.cli.exits import CommandError
from raftkv.cli.server.flags import FLAGS, SETTING
from raftkv.cli.server.options import read_options
from raftkv.config import ServerConfig


def read(*words, **environment):
    return read_options(words, environment)


def refused(*words, **environment):
    with pytest.raises(CommandError) as raised:
        read_options(words, environment)
    assert "\n" not in str(raised.value)
    return raised.value.code, str(raised.value)


def test_no_flags_are_the_defaults():
    assert read().config == ServerConfig()
    assert read().warnings == []


@pytest.mark.parametrize(
    "words",
    [["--name=a"], ["--name", "a"], ["-name=a"], ["-name", "a"], ["--name=b", "--name=a"], ["--name=a", "--"]],
)
def test_ways_to_give_a_flag(words):
    config = read(*words).config
    assert (config.name, config.data_dir, config.initial_cluster) == ("a", "a.etcd", "a=http://localhost:2380")


def test_units():
    config = read(
        "--heartbeat-interval=50",
        "--election-timeout=500",
        "--backend-batch-interval=20ms",
        "--grpc-keepalive-interval=1h30m",
        "--quota-backend-bytes=0x100000",
        "--auto-compaction-retention=2",
    ).config
    assert (config.heartbeat_interval_s, config.election_timeout_s, config.election_ticks) == (0.05, 0.5, 10)
    assert (config.backend_batch_interval_s, config.grpc_keepalive_interval_s) == (0.02, 5400.0)
    assert (config.quota_bytes, config.auto_compaction_retention_s) == (2**20, 7200.0)


def test_retention_by_mode():
    assert read("--auto-compaction-retention=90s").config.auto_compaction_retention_s == 90.0
    revisions = read("--auto-compaction-mode=revision", "--auto-compaction-retention=1000").config
    assert (revisions.auto_compaction_retention_revisions, revisions.auto_compaction_retention_s) == (1000, 0.0)
    assert refused("--auto-compaction-mode=revision", "--auto-compaction-retention=1h")[0] == 1
    assert refused("--auto-compaction-retention=soon")[0] == 1


def test_booleans_take_no_next_word():
    assert read("--pre-vote=false").config.pre_vote is False
    assert read("-pre-vote").config.pre_vote is True
    assert refused("--pre-vote", "false") == (1, "'false' is not a valid flag")


def test_urls_are_sorted_and_unique():
    config = read("--listen-peer-urls=http://127.0.0.1:3,http://127.0.0.1:1, http://127.0.0.1:1").config
    assert config.listen_peer_urls == ("http://127.0.0.1:1", "http://127.0.0.1:3")


def test_listening_elsewhere_needs_advertising():
    text = "--advertise-client-urls is required when --listen-client-urls is set explicitly"
    assert refused("--listen-client-urls=http://127.0.0.1:1") == (1, text)
    assert refused(ETCD_LISTEN_CLIENT_URLS="http://127.0.0.1:1") == (1, text)


def test_environment():
    options = read("--name=a", ETCD_DATA_DIR="/d", ETCD_PRE_VOTE="false", ETCD_WAL_DIR="", PATH="/bin")
    assert (options.config.data_dir, options.config.pre_vote, options.warnings) == ("/d", False, [])
    assert read(ETCD_NOTHING="x").warnings == ["unrecognized environment variable ETCD_NOTHING=x"]
    assert refused("--name=a", ETCD_NAME="a") == (
        1,
        "conflicting environment variable ETCD_NAME is shadowed by corresponding command-line flag "
        "(either unset environment variable or disable flag)",
    )
    code, text = refused(ETCD_HEARTBEAT_INTERVAL="abc")
    assert (code, text) == (1, 'invalid value "abc" for ETCD_HEARTBEAT_INTERVAL: parse error')


YAML = """
name: filed
data-dir: /data
heartbeat-interval: 50
election-timeout: 500
grpc-keepalive-interval: 1000000000
backend-batch-interval: 20ms
pre-vote: false
listen-client-urls: http://127.0.0.1:1,http://127.0.0.1:2
log-outputs: [stderr, /tmp/log]
client-transport-security:
  cert-file: c.pem
  key-file: k.pem
  client-cert-auth: false
peer-transport-security:
  trusted-ca-file: ca.pem
socket-options:
  reuse-port: true
colour: blue
"""


def test_a_file_is_all_that_counts(tmp_path):
    path = tmp_path / "raftkv.yml"
    path.write_text(YAML)
    options = read(f"--config-file={path}", "--name=ignored", "--max-txn-ops=1", ETCD_NAME="ignored too")
    config = options.config
    assert (config.name, config.data_dir, config.max_txn_ops, config.pre_vote) == ("filed", "/data", 128, False)
    assert (config.heartbeat_interval_s, config.grpc_keepalive_interval_s) == (0.05, 1.0)
    assert config.backend_batch_interval_s == 0.02
    assert config.listen_client_urls == ("http://127.0.0.1:1", "http://127.0.0.1:2")
    assert config.log_outputs == ("/tmp/log", "stderr")
    assert (config.client_tls.cert_file, config.client_tls.key_file) == ("c.pem", "k.pem")
    assert config.peer_tls.trusted_ca_file == "ca.pem"
    assert options.warnings == [
        f"{path}: unknown setting 'colour' is ignored",
        "socket-reuse-port has no effect in raftkv",
    ]
    assert read(ETCD_CONFIG_FILE=str(path)).config.name == "filed"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("- a\n", "expected settings as 'name: value'"),
        ("a: [\n", "while parsing a flow node"),
        ("heartbeat-interval: soon\n", 'invalid value "soon" for heartbeat-interval: parse error'),
        ("election-timeout: 1\n", "should be at least as 5 times"),
        ("discovery: http://x\n", "discovery is not implemented in raftkv"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, text, error):
    path = tmp_path / "bad.yml"
    path.write_text(text)
    code, found = refused(f"--config-file={path}")
    assert (code, error in found) == (1, True), found


def test_a_file_that_is_not_text(tmp_path):
    path = tmp_path / "bad.yml"
    path.write_bytes(b"name: \xff")
    assert refused(f"--config-file={path}") == (1, f"{path}: not UTF-8 at byte 6")
    assert refused("--config-file=/nowhere/x.yml") == (1, "open /nowhere/x.yml: No such file or directory")
    path.write_bytes(b"")
    assert read(f"--config-file={path}").config == ServerConfig()


def test_old_names():
    assert read("--experimental-compaction-batch-limit=7").config.compaction_batch_limit == 7
    assert read("--snapshot-catchup-entries=9").config.snapshot_catchup_entries == 9


def test_idle_flags_are_remarked_upon():
    assert read("--bcrypt-cost=4").warnings == ["--bcrypt-cost has no effect in raftkv"]
    assert read("--max-wals=5").warnings == ["--max-wals has no effect in raftkv"]
    assert read("--enable-pprof").warnings == ["--enable-pprof has no effect in raftkv"]
    assert read("--metrics=extensive").warnings == ["--metrics has no effect in raftkv"]
    assert read("--metrics=basic", "--enable-pprof=false", "--logger=zap").warnings == []
    assert len(read("--quota-backend-bytes=10000000000").warnings) == 1


def test_what_raftkv_would_not_do_is_refused():
    assert refused("--auto-tls") == (1, "--auto-tls is not implemented in raftkv")
    assert refused("--force-new-cluster") == (1, "--force-new-cluster is not implemented in raftkv")
    assert refused("--client-crl-file=x")[0] == refused("--peer-cert-allowed-cn=x")[0] == 1
    assert read("--force-new-cluster=false").warnings == []
    assert refused("--discovery-srv=example.org") == (1, "--discovery-srv is not implemented in raftkv")
    assert read("--auto-tls=false", "--proxy=off", "--auth-token=simple").warnings == []


def test_origins_are_urls():
    assert read("--cors=http://a.example:80,https://b.example:443").config.cors == (
        "http://a.example:80",
        "https://b.example:443",
    )
    assert read("--cors=").config.cors == read("--cors=*").config.cors == ("*",)
    assert refused("--cors=http://a.example") == (
        2,
        'invalid value "http://a.example" for flag -cors: '
        'URL address does not have the form "host:port": http://a.example',
    )


def test_help_and_version():
    assert read("--help").help
    assert read("-h").help
    assert read("--version").version
    assert not read("--version=false").version


def test_every_setting_reaches_a_field():
    fields = {field.name for field in dataclasses.fields(ServerConfig)} | {"auto_compaction_retention"}
    for flag in FLAGS.values():
        if flag.fate == SETTING:
            assert flag.field.split(".")[0] in fields, flag.name
            assert flag.help, flag.name


WORDS = st.one_of(
    st.text(max_size=10),
    st.builds("--{}={}".format, st.sampled_from(sorted(FLAGS)), st.text(max_size=10)),
    st.builds("-{}".format, st.sampled_from(sorted(FLAGS))),
)


@given(st.lists(WORDS, max_size=4))
def test_any_command_line_is_read_or_refused(words):
    words = [word for word in words if "config-file" not in word]
    with contextlib.suppress(CommandError):
        read_options(words, {})
