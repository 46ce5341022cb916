"""etcd-client-py as a user with a password; it knows no TLS."""

from __future__ import annotations

from typing import Any

from common import client, failure, key, run
from etcd_client import ConnectOptions
from report import Report

THEIRS = b"~others"


def connect(report: Report, user: str, password: str) -> Any:
    return client(report).connect(ConnectOptions().with_timeout(10.0).with_user(user, password))


async def by_password(report: Report) -> None:
    async with connect(report, "alice", "alice-pw") as connection:
        own = key(report, "a")
        await connection.put(own, b"1")
        report.step("own", await connection.get(own))
        await connection.delete(own)
        report.step("deleted", await connection.get(own))
        await report.afails("get", connection.get(THEIRS), failure)
        await report.afails("put", connection.put(THEIRS, b"1"), failure)
        await report.afails("delete", connection.delete(THEIRS), failure)


async def refused(report: Report) -> None:
    async def login(user: str, password: str) -> None:
        async with connect(report, user, password) as connection:
            await connection.get(key(report, "a"))

    await report.afails("wrong", login("alice", "wrong"), failure)
    await report.afails("none", login("none", "alice-pw"), failure)


if __name__ == "__main__":
    run(by_password, refused)
