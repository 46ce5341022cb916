"""From flags, environment and file to a configuration."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from dataclasses import replace

import pytest

from raftkv.cli.program import CommandError
from raftkv.cli.server_options import FLAGS, SETTING, read_options
from raftkv.config import FEATURES, LogRotation, ServerConfig, TLSFiles, Tracing
from raftkv.server.listening import addresses


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
    "words", [["--name=a"], ["--name", "a"], ["-name=a"], ["-name", "a"], ["--name=b", "--name=a"], ["--name=a", "--"]]
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


def test_the_dashboard_is_on_unless_it_is_turned_off():
    assert read().config.enable_ui
    assert not read("--enable-ui=false").config.enable_ui
    assert not read(ETCD_ENABLE_UI="false").config.enable_ui


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
    (misspelt,) = read(ETCD_DATADIR="x").warnings
    assert misspelt.endswith(" ETCD_DATADIR=x (did you mean ETCD_DATA_DIR?)")
    assert refused("--name=a", ETCD_NAME="a") == (
        1,
        "conflicting environment variable ETCD_NAME is shadowed by corresponding command-line flag "
        "(either unset environment variable or disable flag)",
    )
    code, text = refused(ETCD_HEARTBEAT_INTERVAL="abc")
    wanted = "give a whole number of milliseconds"
    assert (code, text) == (1, f'invalid value "abc" for ETCD_HEARTBEAT_INTERVAL: parse error; {wanted}')


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
        f"{path} counts alone: --max-txn-ops, --name, ETCD_NAME have no effect",
        f"{path}: unknown setting 'colour' is ignored",
        "socket-reuse-port has no effect in raftkv",
    ]
    assert read(ETCD_CONFIG_FILE=str(path)).config.name == "filed"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("- a\n", "expected settings as 'name: value'"),
        ("a: [\n", "while parsing a flow node"),
        ("heartbeat-interval: soon\n", 'invalid value "soon" for heartbeat-interval: parse error; give a whole number'),
        ("election-timeout: 1\n", "should be at least as 5 times"),
        ("discovery: http://x\n", "discovery is not implemented in raftkv"),
        ("client-transport-security: 5\n", "client-transport-security has settings of its own, as 'name: value' below"),
        ("peer-transport-security: [a]\n", "peer-transport-security has settings of its own"),
        ("socket-options: x\n", "socket-options has settings of its own"),
        (
            "client-transport-security: {cert-file: {a: b}}\n",
            "cert-file takes a value, and is given settings of its own: a",
        ),
        ('data-dir: "a\\0b"\n', "data-dir has what no name of a file can have: 'a\\x00b'"),
        ('{\t"data-dir": "\\ud800"}\n', "data-dir has what no name of a file can have: '\\ud800'"),
        ("{\t'name': a}\n", "found character '\\t' that cannot start any token"),
        ("listen-client-urls: {http: x}\n", "listen-client-urls takes a value, and is given settings of its own: http"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, text, error):
    path = tmp_path / "bad.yml"
    path.write_text(text)
    code, found = refused(f"--config-file={path}")
    assert (code, error in found) == (1, True), found


def test_a_file_of_json_may_have_tabs(tmp_path):
    """etcd starts with such a file; PyYAML takes no tabs between tokens."""
    path = tmp_path / "raftkv.json"
    path.write_text('{\n\t"name": "a",\n\t"listen-client-urls":\t["http://127.0.0.1:1"],\n\t"log-level": "warn"\n}\n')
    options = read(f"--config-file={path}")
    config = options.config
    assert (config.name, config.log_level, options.warnings) == ("a", "warn", [])
    assert config.listen_client_urls == ("http://127.0.0.1:1",)


def test_an_empty_section_sets_nothing(tmp_path):
    path = tmp_path / "raftkv.yml"
    path.write_text("client-transport-security:\npeer-transport-security: {}\n")
    options = read(f"--config-file={path}")
    assert (options.config, options.warnings) == (ServerConfig(), [])


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
    assert read("--max-snapshots=4").warnings == ["--max-snapshots has no effect in raftkv"]
    assert read("--max-wals=5").warnings == ["--max-wals has no effect in raftkv"]
    assert read("--metrics=extensive").warnings == []
    assert read("--metrics=basic", "--logger=zap").warnings == []
    assert len(read("--quota-backend-bytes=10000000000").warnings) == 1


def test_unsupported_option_values_are_refused():
    assert read("--force-new-cluster").config.force_new_cluster
    assert refused("--discovery-srv=example.org") == (1, "--discovery-srv is not implemented in raftkv")
    assert read("--proxy=off", "--auth-token=simple").warnings == []


def test_tracing_by_both_spellings():
    words = ("address=c:1", "service-name=kv", "instance-id=i", "sampling-rate=1000000")
    expected = Tracing(enabled=True, address="c:1", service_name="kv", instance_id="i", sampling_rate=1_000_000)
    for prefix in ("--", "--experimental-"):
        given = (f"{prefix}enable-distributed-tracing", *(f"{prefix}distributed-tracing-{word}" for word in words))
        assert read(*given).config.tracing == expected
    assert read().config.tracing == Tracing()
    on = "--enable-distributed-tracing"
    beginning = "distributed tracing configurition is not valid: (tracing sampling rate must be"
    assert refused(on, "--distributed-tracing-sampling-rate=-1") == (1, f"{beginning} positive)")
    assert refused(on, "--distributed-tracing-sampling-rate=1000001") == (1, f"{beginning} less than 1000000)")
    assert read("--distributed-tracing-sampling-rate=-1").config.tracing.sampling_rate == -1
    for address in ("collector", "c:port", "c:65536", "https://c:1"):
        told = f"--distributed-tracing-address must be HOST:PORT (set to {address!r})"
        assert refused(on, f"--distributed-tracing-address={address}") == (1, told)
    for address in ("[::1]:4317", "http://c:4317/"):
        assert read(on, f"--distributed-tracing-address={address}").config.tracing.address == address


def test_log_rotation_in_lumberjacks_words():
    given = ("--log-outputs=/l/raftkv.log,stderr", "--enable-log-rotation")
    assert read(*given).config.log_rotation == LogRotation()
    text = '{"maxSize": 7, "maxage": 2, "maxbackups": 3, "localtime": true, "compress": true, "other": [1.5]}'
    assert read(*given, f"--log-rotation-config-json={text}").config.log_rotation == LogRotation(7, 2, 3, True, True)
    assert read(f"--log-rotation-config-json={text}").config.log_rotation is None
    assert read(*given, "--log-rotation-config-json=null").config.log_rotation == LogRotation()
    for outputs in ("default", "stderr", "a,b"):
        assert refused("--enable-log-rotation", f"--log-outputs={outputs}") == (
            1,
            "--log-outputs requires a single file path when --log-rotate-config-json is defined",
        )


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"maxsize": true}', "invalid log rotation config: maxsize is true; give a whole number, 0 or more"),
        ('{"maxsize": "1"}', 'invalid log rotation config: maxsize is "1"; give a whole number, 0 or more'),
        ('{"MaxSize":1.5}', "invalid log rotation config: MaxSize is 1.5; give a whole number, 0 or more"),
        ('{"maxage":-1}', "invalid log rotation config: maxage is -1; give a whole number, 0 or more"),
        ('{"compress":"a"}', 'invalid log rotation config: compress is "a"; give true or false'),
        ("[]", "invalid log rotation config: want an object, as {}"),
        ('{"maxsize": 1', "improperly formatted log rotation config: Expecting "),
        ("", "improperly formatted log rotation config: Expecting value"),
        ("{} x", "improperly formatted log rotation config: Extra data"),
        ("[" * 10_001 + "]" * 10_001, "improperly formatted log rotation config: "),
    ],
)
def test_log_rotation_that_cannot_be_read_is_refused(text, fault):
    given = ("--log-outputs=/l/raftkv.log", "--enable-log-rotation", f"--log-rotation-config-json={text}")
    code, line = refused(*given)
    assert (code, line.startswith(fault), "\n" in line) == (1, True, False)


def test_tls_settings():
    files = ("--cert-file=c", "--key-file=k", "--trusted-ca-file=ca")
    client = read(*files, "--client-crl-file=crl", "--client-cert-allowed-hostname=b,a").config.client_tls
    assert client == TLSFiles("c", "k", trusted_ca_file="ca", crl_file="crl", allowed_hostname=("a", "b"))
    assert client.verifies
    peer_files = ("--peer-cert-file=c", "--peer-key-file=k", "--peer-trusted-ca-file=ca")
    words = ("--peer-crl-file=crl", "--peer-cert-allowed-cn=x,y", "--experimental-peer-skip-client-san-verification")
    peer = read(*peer_files, *words).config.peer_tls
    assert (peer.crl_file, peer.allowed_cn, peer.skip_san_verification) == ("crl", ("x", "y"), True)
    config = read("--auto-tls", "--peer-auto-tls", "--self-signed-cert-validity=3", "--cipher-suites=B,A").config
    assert (config.client_tls.self_signed, config.peer_tls.self_signed) == (True, True)
    assert (config.self_signed_validity_years, config.cipher_suites) == (3, ("A", "B"))
    given = read(*files, "--auto-tls")
    assert not given.config.client_tls.self_signed
    assert given.warnings == ["--auto-tls is ignored: a certificate is given"]


def test_peers_off_this_machine_need_certificates_or_a_word_for_it():
    far = "--listen-peer-urls=http://0.0.0.0:2380"
    code, line = refused(far)
    assert (code, line.startswith("refusing to listen for peers on http://0.0.0.0:2380 without TLS: ")) == (1, True)
    assert line.endswith("or accept it with --insecure-peers")
    assert read(far, "--insecure-peers").config.insecure_peers
    assert read(far, ETCD_INSECURE_PEERS="true").config.insecure_peers
    for near in ("http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1", "unix://a:1"):
        assert read(f"--listen-peer-urls={near}").config.listen_peer_urls
    secure = ("--listen-peer-urls=https://10.0.0.1:1", "--peer-cert-file=c", "--peer-key-file=k")
    assert "without asking for certificates" in refused(*secure)[1]
    assert read(*secure, "--peer-trusted-ca-file=ca").config.peer_tls.verifies
    assert read(secure[0], "--peer-auto-tls").config.peer_tls.self_signed


def test_sections_of_a_file_have_the_names_of_etcd(tmp_path):
    path = tmp_path / "etcd.yaml"
    path.write_text(
        "client-transport-security: {trusted-ca-file: c, allowed-cn: [d]}\n"
        "peer-transport-security: {trusted-ca-file: p, allowed-cn: [b]}\n"
        "discovery-config: {token: ''}\n"
    )
    options = read(f"--config-file={path}")
    assert (options.config.client_tls.allowed_cn, options.config.peer_tls.allowed_cn) == (("d",), ("b",))
    assert options.warnings == []


def test_one_address_may_serve_both_schemes():
    both = ("http://127.0.0.1:1", "https://127.0.0.1:1")
    assert addresses(both) == addresses(both[::-1]) == {both[1]: True}
    assert addresses((both[0], both[0])) == {both[0]: False}
    assert addresses(("http://127.0.0.1:0", "http://127.0.0.1:2", "unix://a:1", "unixs://a:1")) == {
        "http://127.0.0.1:0": False,
        "http://127.0.0.1:2": False,
        "unixs://a:1": True,
    }


def test_feature_gates():
    config = read("--feature-gates=InitialCorruptCheck=true, CompactHashCheck=1,LeaseCheckpoint=false").config
    assert (config.initial_corrupt_check, config.compact_hash_check) == (True, True)
    assert read("--experimental-initial-corrupt-check", "--experimental-corrupt-check-time=5m").config == replace(
        ServerConfig(), initial_corrupt_check=True, corrupt_check_time_s=300.0
    )
    assert not read("--feature-gates=InitialCorruptCheck=false,AllAlpha=false").config.initial_corrupt_check
    alpha = read("--feature-gates=AllAlpha=true,CompactHashCheck=false").config
    assert (alpha.initial_corrupt_check, alpha.compact_hash_check) == (True, False)
    for name, (is_on, _) in FEATURES.items():
        assert read(f"--feature-gates={name}={str(is_on).lower()}").warnings == []
        warned = read(f"--feature-gates={name}={str(not is_on).lower()}").warnings
        expected = f"feature gate {name} has no effect in raftkv"
        assert warned == ([] if name in ("InitialCorruptCheck", "CompactHashCheck") else [expected])
    for text, error in (
        ("X=true", "unrecognized feature gate: X"),
        ("InitialCorruptCheck", "missing bool value for InitialCorruptCheck"),
    ):
        assert refused(f"--feature-gates={text}") == (2, f'invalid value "{text}" for flag -feature-gates: {error}')
    code, error = refused("--feature-gates=CompactHashCheck=true", "--experimental-compact-hash-check-enabled=false")
    assert code == 1
    assert error.startswith("cannot specify both flags: --experimental-compact-hash-check-enabled=false and ")


def test_origins_are_urls():
    assert read("--cors=http://a.example:80,https://b.example:443").config.cors == (
        "http://a.example:80",
        "https://b.example:443",
    )
    assert read("--cors=").config.cors == read().config.cors == ()
    assert read("--cors=*").config.cors == ("*",)
    assert read("--host-whitelist=").config.host_whitelist == read().config.host_whitelist == ()
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


def test_a_python_without_assertions_is_refused():
    done = subprocess.run(
        [sys.executable, "-O", "-m", "raftkv", "version"], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "raftkv: assertions are off: run raftkv without python -O and PYTHONOPTIMIZE\n"


def test_every_setting_reaches_a_field():
    fields = {field.name for field in dataclasses.fields(ServerConfig)}
    fields |= {"auto_compaction_retention", "feature_gates", "log_rotation_json"}
    for flag in FLAGS.values():
        if flag.fate == SETTING:
            assert flag.field.split(".")[0] in fields, flag.name
            assert flag.help, flag.name


def test_secure_refuses_in_one_list_and_notes_requests():
    with pytest.raises(CommandError) as caught:
        read("--secure", "--cors=*", "--data-dir=d")
    assert caught.value.code == 1
    assert [line.split(":")[0] for line in str(caught.value).splitlines() if line.startswith("  - ")] == [
        "  - peers on http",
        "  - clients on http",
        "  - --cors",
    ]
    certificates = [
        f"--{kind}{name}=f" for kind in ("", "peer-") for name in ("cert-file", "key-file", "trusted-ca-file")
    ]
    urls = [f"--{name}=https://127.0.0.1:2380" for name in ("listen-peer-urls", "initial-advertise-peer-urls")]
    urls += [f"--{name}=https://127.0.0.1:2379" for name in ("listen-client-urls", "advertise-client-urls")]
    config = read(
        "--secure", "--data-dir=d", "--initial-cluster=default=https://127.0.0.1:2380", *urls, *certificates
    ).config
    assert config.audit_log == "d/audit.log"
    assert read("--data-dir=d").config.audit_log == ""


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("snapshot-count:", "snapshot_count", 10_000),
        ("name: null", "name", "default"),
        ("quota-backend-bytes: 8.589934592e+09", "quota_backend_bytes", 8 * 1024**3),
        ("election-timeout: 1.5e3", "election_timeout_s", 1.5),
        ("snapshot-count: 1e4", "snapshot_count", 10_000),
        ("compaction-sleep-interval: 1e9", "compaction_sleep_interval_s", 1.0),
        ("initial-cluster-state: ''", "initial_cluster_state", "new"),
        ("auto-compaction-mode: ''", "auto_compaction_mode", "periodic"),
        ("auto-compaction-retention: ''", "auto_compaction_retention_s", 0.0),
        ("log-level: ''", "log_level", "info"),
    ],
)
def test_a_file_of_yaml_is_read_as_its_json(tmp_path, line, field, value):
    path = tmp_path / "raftkv.yml"
    path.write_text(line + "\n")
    assert getattr(read(f"--config-file={path}").config, field) == value


@pytest.mark.parametrize("line", ["snapshot-count: 1.5", "name: ''", "snapshot-count: .inf", "snapshot-count: ''"])
def test_a_value_that_is_none_of_its_setting_stops_the_start(tmp_path, line):
    path = tmp_path / "raftkv.yml"
    path.write_text(line + "\n")
    with pytest.raises(CommandError):
        read(f"--config-file={path}")
