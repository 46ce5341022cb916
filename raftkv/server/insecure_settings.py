"""The insecure settings of a member, and the flags that make each secure.

Each is logged as one line at start; with ``--secure`` the member does not start while there is one. Of files, only the
permissions of private keys are checked: a data directory that others may write to is always refused
(``storage.datadir``), and whether authentication is enabled is in the store.

>>> [one.what for one in list_insecure_settings(ServerConfig())][0]
'peers on http://localhost:2380 use no TLS: every host on the network path can read and change all data'
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from raftkv import cluster_id
from raftkv.config import ServerConfig, TLSFiles, is_loopback
from raftkv.server.auth.jwt_tokens import parse_options
from raftkv.server.tls.certificates import is_open_to_others

AUDIT_LOG: Final = "audit.log"
"""Name of the audit log in the data directory; the default with ``--secure``."""


PASSWORD_LENGTH_MIN: Final = 8
"""Minimum length of a new password with ``--secure``, in characters."""

DEFAULT_BCRYPT_COST: Final = ServerConfig.bcrypt_cost


@dataclass(frozen=True, slots=True)
class InsecureSetting:
    """One insecure setting.

    Attributes:
        what: the setting, and what a stranger can do with it.
        remedy: flags that fix it.
    """

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}"


def list_insecure_settings(config: ServerConfig) -> list[InsecureSetting]:
    """Return the insecure settings of a member, the worst first.

    Arguments:
        config: settings of the member.
    """
    return [*_peers(config), *_clients(config), *_users(config), *_keys(config), *_http(config)]


def hardened(config: ServerConfig) -> ServerConfig:
    """Return settings with the defaults of ``--secure``: an audit log, and a minimum password length.

    Arguments:
        config: settings of the member.
    """
    return replace(
        config,
        audit_log=config.audit_log or str(Path(config.data_dir, AUDIT_LOG)),
        auth_min_password_length=config.auth_min_password_length or PASSWORD_LENGTH_MIN,
    )


def refusal(found: Sequence[InsecureSetting]) -> str:
    """Return the message of ``--secure`` when it does not start: a list, one setting per line.

    Arguments:
        found: insecure settings.
    """
    lines = (f"\n  - {one.what}\n      {one.remedy}" for one in found)
    return f"--secure: these settings are insecure (`raftkv certs` makes certificates):{''.join(lines)}"


def _peers(config: ServerConfig) -> Iterator[InsecureSetting]:
    files = config.peer_tls
    if config.insecure_peers:
        yield InsecureSetting(
            "--insecure-peers: every host that reaches the peer port can rewrite all data", "leave it out"
        )
    yield from _port(
        "peers",
        (*config.listen_peer_urls, *config.initial_advertise_peer_urls),
        files,
        "--listen-peer-urls and --initial-advertise-peer-urls with https, --peer-cert-file, --peer-key-file",
        "--peer-",
    )
    if files.skip_san_verification:
        flag = "--peer-skip-client-san-verification"
        yield InsecureSetting(f"{flag}: every certificate of the authority is accepted as a member's", "leave it out")


def _clients(config: ServerConfig) -> Iterator[InsecureSetting]:
    yield from _port(
        "clients",
        (*config.listen_client_urls, *config.listen_client_http_urls, *config.advertise_client_urls),
        config.client_tls,
        "--listen-client-urls and --advertise-client-urls with https, --cert-file, --key-file",
        "--",
    )


def _users(config: ServerConfig) -> Iterator[InsecureSetting]:
    if config.bcrypt_cost < DEFAULT_BCRYPT_COST:
        what = f"--bcrypt-cost {config.bcrypt_cost}: passwords are quickly cracked from a stolen database"
        yield InsecureSetting(what, f"set it to {DEFAULT_BCRYPT_COST} (the default) or more")
    if 0 < config.auth_min_password_length < PASSWORD_LENGTH_MIN:
        what = f"--auth-min-password-length {config.auth_min_password_length}: attackers can guess passwords"
        yield InsecureSetting(what, f"set it to {PASSWORD_LENGTH_MIN} or more")


def _keys(config: ServerConfig) -> Iterator[InsecureSetting]:
    paths = [path for files in (config.client_tls, config.peer_tls) for path in (files.key_file, files.client_key_file)]
    tokens = parse_options(config.auth_token)
    if tokens is not None:
        paths.append(tokens.private_file)
    for path in dict.fromkeys(filter(None, paths)):
        if is_open_to_others(path):
            yield InsecureSetting(f"other users of this machine can read the private key {path}", f"chmod 0600 {path}")


def _port(who: str, urls: Sequence[str], files: TLSFiles, remedy: str, prefix: str) -> Iterator[InsecureSetting]:
    plain = sorted({url for url in urls if cluster_id.split_url(url)[0] == "http"})
    if plain:
        what = f"{who} on {', '.join(plain)} use no TLS: every host on the network path can read and change all data"
        yield InsecureSetting(what, f"{remedy}, {prefix}trusted-ca-file")
    elif files.self_signed:
        yield InsecureSetting(
            f"{prefix}auto-tls does not verify the other end: an attacker on the network can read and change all data,"
            " and every host that reaches the port can connect",
            f"{prefix}cert-file, {prefix}key-file, {prefix}trusted-ca-file",
        )
    elif not files.verifies:
        what = f"{who} need no certificate: every host that reaches the port can send requests"
        yield InsecureSetting(
            what, f"set {prefix}trusted-ca-file FILE, so that only certificates of that authority can connect"
        )


def _http(config: ServerConfig) -> Iterator[InsecureSetting]:
    for url in config.listen_metrics_urls:
        scheme, host, _ = cluster_id.split_url(url)
        if scheme == "http" and not is_loopback(host):
            what = f"metrics on {url} use no TLS: every host that reaches the port can read them"
            yield InsecureSetting(what, "use https in --listen-metrics-urls, or a loopback address")
    if config.cors:
        what = f"--cors: web pages of {', '.join(config.cors)} can send requests from the browsers of their visitors"
        yield InsecureSetting(what, "leave it out")
    if "*" in config.host_whitelist:
        what = (
            "--host-whitelist '*': web pages can send plain HTTP requests through a host name of theirs (DNS rebinding)"
        )
        yield InsecureSetting(what, "leave it out, or name hosts")
    if config.unsafe_no_fsync:
        yield InsecureSetting("--unsafe-no-fsync: a power failure loses acknowledged writes", "leave it out")
