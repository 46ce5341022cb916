"""etcdctl as a user: a password over TLS, the common name of a certificate, and what either may do."""

from __future__ import annotations

import os

from common import ctl
from report import Report, run

HOME = os.environ["FOREIGN_CERTS"]
THEIRS = "~others"


KEYS = slice(0, 6)


def use(report: Report, name: str, *who: str, commands: slice = slice(None)) -> None:
    files = (f"--cacert={HOME}/ca.crt", f"--cert={HOME}/{name}.crt", f"--key={HOME}/{name}.key")
    endpoints = [f"https://{endpoint}" for endpoint in report.endpoints]
    key = report.key("a")
    every: list[tuple[str, ...]] = [
        ("put", key, "1"),
        ("get", key),
        ("del", key),
        ("get", THEIRS),
        ("put", THEIRS, "1"),
        ("get", "", "--prefix"),
        ("user", "get", "alice"),
        ("user", "get", "root"),
        ("role", "get", "own"),
        ("user", "list"),
        ("auth", "disable"),
    ]
    for words in every[commands]:
        report.step(" ".join(words).replace(report.prefix, ""), ctl(report, *files, *who, *words, endpoints=endpoints))


def by_password(report: Report) -> None:
    use(report, "nobody", "--user=alice:alice-pw")


def by_certificate(report: Report) -> None:
    use(report, "alice")


def with_a_wrong_password(report: Report) -> None:
    use(report, "alice", "--user=alice:wrong", commands=KEYS)


def as_nobody(report: Report) -> None:
    """A name that no user has. (Of what is root's alone etcd says that the user is not found.)"""
    use(report, "nobody", commands=KEYS)


if __name__ == "__main__":
    run(by_password, by_certificate, with_a_wrong_password, as_nobody)
