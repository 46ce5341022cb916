"""python etcd3 0.12 as a user: a password over TLS, the common name of a certificate, and what either may do."""

from __future__ import annotations

import os

import etcd3
from common import failure
from report import Report, run

HOME = os.environ["FOREIGN_CERTS"]
THEIRS = "~others"


def connect(report: Report, name: str, **options: str) -> etcd3.Etcd3Client:
    files = {"ca_cert": f"{HOME}/ca.crt", "cert_cert": f"{HOME}/{name}.crt", "cert_key": f"{HOME}/{name}.key"}
    return etcd3.client(host=report.host, port=report.port, timeout=60, **files, **options)


def use(report: Report, client: etcd3.Etcd3Client) -> None:
    key = report.key("a")
    events, cancel = client.watch(key)
    lease = client.lease(60)
    client.put(key, "1", lease=lease)
    report.step("own", client.get(key)[0], next(events).value)
    cancel()
    report.step("deleted", client.delete(key))
    report.fails("get", lambda: client.get(THEIRS), failure)
    report.fails("put", lambda: client.put(THEIRS, "1"), failure)
    report.fails("delete", lambda: client.delete(THEIRS), failure)
    report.fails("all", lambda: list(client.get_all()), failure)
    txn = {"compare": [client.transactions.version(THEIRS) == 0], "success": [], "failure": []}
    report.fails("txn", lambda: client.transaction(**txn), failure)


def by_password(report: Report) -> None:
    use(report, connect(report, "nobody", user="alice", password="alice-pw"))


def by_certificate(report: Report) -> None:
    use(report, connect(report, "alice"))


def refused(report: Report) -> None:
    for user, password in (("alice", "wrong"), ("none", "alice-pw")):
        report.fails(user, lambda user=user, pw=password: connect(report, "nobody", user=user, password=pw), failure)
    client = connect(report, "nobody")
    report.fails("nobody", lambda: client.get("a"), failure)


if __name__ == "__main__":
    run(by_password, by_certificate, refused)
