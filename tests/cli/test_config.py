"""What a configuration refuses, and what it computes."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftkv import cluster_id
from raftkv.config import DEFAULT_QUOTA_BYTES, ServerConfig, TLSFiles
from raftkv.errors import ConfigError

REFUSED = [
    ({"name": ""}, "--name must not be empty"),
    ({"heartbeat_interval_s": 0.0}, "--heartbeat-interval must be >0 (set to 0ms)"),
    ({"election_timeout_s": 0.0}, "--election-timeout must be >0 (set to 0ms)"),
    (
        {"election_timeout_s": 0.4},
        "--election-timeout[400ms] should be at least as 5 times as --heartbeat-interval[100ms]",
    ),
    ({"election_timeout_s": 51.0}, "--election-timeout[51000ms] is too long, and should be set less than 50000ms"),
    ({"max_txn_ops": 0}, "--max-txn-ops must be >0 (set to 0)"),
    ({"backend_batch_interval_s": -1.0}, "--backend-batch-interval must not be negative (set to -1s)"),
    ({"listen_peer_urls": ("http://example.org:1",)}, "expected IP in URL for binding (http://example.org:1)"),
    ({"listen_client_urls": ()}, "--listen-peer-urls and --listen-client-urls must not be empty"),
    ({"advertise_client_urls": ()}, "--advertise-client-urls is required when --listen-client-urls is set explicitly"),
    (
        {"initial_advertise_peer_urls": ("http://:2380",)},
        '--initial-advertise-peer-urls "http://:2380" must be "host:port" (unexpected empty host (http://:2380))',
    ),
    ({"initial_cluster": "a"}, "--initial-cluster=a: a has no URL; give NAME=URL,NAME=URL"),
    ({"initial_cluster": "a=http://x"}, 'URL address does not have the form "host:port": http://x'),
    ({"initial_cluster": "a=http://x:1/p"}, "URL must not contain a path: http://x:1/p"),
    ({"initial_cluster_state": "old"}, '--initial-cluster-state "old" is not one of new, existing'),
    ({"log_level": "loud"}, '--log-level "loud" is not one of debug, info, warn, error, panic, fatal'),
    ({"auto_compaction_mode": "daily"}, 'unknown auto-compaction-mode "daily"'),
    ({"tls_min_version": "TLS1.0"}, '--tls-min-version "TLS1.0" is not one of TLS1.2, TLS1.3'),
    (
        {"tls_min_version": "TLS1.3", "tls_max_version": "TLS1.2"},
        "min version (TLS1.3) is greater than max version (TLS1.2)",
    ),
    ({"client_tls": TLSFiles(cert_file="c")}, "--cert-file and --key-file must be given together"),
    ({"peer_tls": TLSFiles(client_cert_auth=True)}, "--peer-client-cert-auth needs --peer-trusted-ca-file"),
    (
        {"client_tls": TLSFiles(crl_file="x")},
        "--client-crl-file needs --trusted-ca-file, whose authorities verify the certificates",
    ),
    (
        {"peer_tls": TLSFiles("c", "k", trusted_ca_file="a", allowed_cn=("x",), allowed_hostname=("y",))},
        "--peer-cert-allowed-cn and --peer-cert-allowed-hostname are mutually exclusive (cn=x, hostname=y)",
    ),
    (
        {"peer_tls": TLSFiles(self_signed=True, trusted_ca_file="a")},
        "--peer-auto-tls and --peer-trusted-ca-file exclude each other: no authority knows a certificate that its "
        "member made for itself",
    ),
    ({"self_signed_validity_years": 0}, "--self-signed-cert-validity must be 1 year or more"),
    (
        {"listen_client_urls": ("https://127.0.0.1:1",)},
        "cannot listen on TLS for https://127.0.0.1:1: --cert-file and --key-file are not given",
    ),
]


@pytest.mark.parametrize(("changes", "text"), REFUSED)
def test_refused(changes, text):
    with pytest.raises(ConfigError) as raised:
        dataclasses.replace(ServerConfig(), **changes)
    assert str(raised.value) == text


def test_every_field_says_what_it_is():
    source = inspect.getsource(ServerConfig)
    for field in dataclasses.fields(ServerConfig):
        line = next(text for text in source.split("\n") if text.startswith(f"    {field.name}: "))
        after = source.split(line + "\n", 1)[1]
        assert after.lstrip().startswith('"""'), field.name


def test_quota():
    assert ServerConfig().quota_bytes == DEFAULT_QUOTA_BYTES
    assert ServerConfig(quota_backend_bytes=-1).quota_bytes is None
    assert ServerConfig(quota_backend_bytes=5).quota_bytes == 5


def test_the_shortest_lease_outlasts_an_election():
    assert ServerConfig().lease_ttl_min_s == 2
    assert ServerConfig(heartbeat_interval_s=0.5, election_timeout_s=5.0).lease_ttl_min_s == 8
    assert ServerConfig(lease_min_ttl_s=1).lease_ttl_min_s == 1
    with pytest.raises(ConfigError, match=r"^--lease-min-ttl must be 0 to 9000000000 s \(set to -1\)$"):
        ServerConfig(lease_min_ttl_s=-1)


THREE = "a=http://127.0.0.1:1,b=http://127.0.0.1:2,c=http://127.0.0.1:3"


def member(name="a", urls=("http://127.0.0.1:1",), cluster=THREE, **more):
    return ServerConfig(name=name, initial_advertise_peer_urls=urls, initial_cluster=cluster, **more)


def test_bootstrap_needs_a_place_in_the_cluster():
    member().check_bootstrap()
    with pytest.raises(ConfigError, match=r"^couldn't find local name \"x\" in the initial cluster configuration$"):
        member("x").check_bootstrap()
    with pytest.raises(ConfigError, match=r"^--initial-cluster has b=http://127\.0\.0\.1:2 but missing from "):
        member("b").check_bootstrap()
    with pytest.raises(ConfigError, match=r"^--initial-advertise-peer-urls has http://127\.0\.0\.1:9 but missing "):
        member(urls=("http://127.0.0.1:1", "http://127.0.0.1:9")).check_bootstrap()
    with pytest.raises(ConfigError, match=r"has duplicate url$"):
        member(cluster=THREE + ",d=http://127.0.0.1:1").check_bootstrap()


def test_a_member_that_joins_need_not_match():
    member("b", initial_cluster_state="existing").check_bootstrap()


def test_localhost_and_its_address_are_one():
    member(urls=("http://localhost:1",)).check_bootstrap()


def test_ids_are_those_of_etcd():
    """The ids are those of a member with all defaults, as every quick start of etcd shows them."""
    assert f"{cluster_id.member_id(['http://localhost:2380'], 'etcd-cluster'):x}" == "8e9e05c52164694d"
    assert f"{cluster_id.cluster_id([0x8E9E05C52164694D]):x}" == "cdf818194e3a8c32"


def test_ids_do_not_depend_on_order():
    config = member()
    founding = config.founding_members()
    assert list(founding) == sorted(founding)
    assert config.member_id in founding
    assert cluster_id.cluster_id(founding) == cluster_id.cluster_id(reversed(list(founding)))
    two = ["http://127.0.0.1:2", "http://127.0.0.1:1"]
    assert cluster_id.member_id(two, "t") == cluster_id.member_id(two[::-1], "t")
    assert cluster_id.member_id(two, "t") != cluster_id.member_id(two, "t", added_at_s=5)


NAMES = st.text(alphabet="abcxyz0-", min_size=1, max_size=5)
URLS = st.builds("http://127.0.0.1:{}".format, st.integers(1, 65535))


@given(st.dictionaries(NAMES, st.sets(URLS, min_size=1, max_size=3), max_size=4))
def test_initial_clusters_survive_printing(members):
    text = cluster_id.format_initial_cluster(members)
    assert cluster_id.parse_initial_cluster(text) == {name: tuple(sorted(urls)) for name, urls in members.items()}
