"""python etcd3: status, members, alarms, hash; users that do not exist."""

from __future__ import annotations

import etcd3
from common import connect, failure
from report import Report, run

REFUSALS = ("FAILED_PRECONDITION", "UNIMPLEMENTED")
"""etcd: authentication is not enabled; a server without it: no such service."""


def status(report: Report) -> None:
    """The library reads every field of the status, and finds the leader among the members."""
    answer = connect(report).status()
    report.step("version", answer.version.count("."), answer.version[0].isdigit())
    report.step("numbers", answer.db_size > 0, answer.raft_index > 0, answer.raft_term > 0)
    report.step("leader", answer.leader.name.startswith("m"), len(list(answer.leader.client_urls)))


def members(report: Report) -> None:
    """The members are those of the cluster, with their client URLs."""
    found = list(connect(report).members)
    urls = sorted(url for member in found for url in member.client_urls)
    report.step("client URLs", urls == sorted(f"http://{endpoint}" for endpoint in report.endpoints))
    report.step("each", all(member.id > 0 and member.name and len(list(member.peer_urls)) == 1 for member in found))


def alarms(report: Report) -> None:
    """An alarm stops puts and leases, not deletes; disarming it ends that."""
    client, key = connect(report), report.key("a")
    client.put(key, "1")
    member = client.status().leader.id
    report.step("none", list(client.list_alarms()))
    raised = client.create_alarm(member_id=member)
    report.step("raised", [[alarm.alarm_type, alarm.member_id == member] for alarm in raised])
    report.step("listed", [[alarm.alarm_type, alarm.member_id == member] for alarm in client.list_alarms()])
    report.fails("put", lambda: client.put(key, "2"), failure)
    report.fails("lease", lambda: client.lease(60), failure)
    report.step("get", client.get(key)[0])
    report.step("delete", client.delete(key))
    report.step("disarmed", [alarm.alarm_type for alarm in client.disarm_alarm(member_id=member)])
    report.step("none", list(client.list_alarms()))
    client.put(key, "3")
    report.step("put", client.get(key)[0])


def maintenance(report: Report) -> None:
    """The hash of a store answers, and a defragmentation leaves what it holds."""
    client = connect(report)
    client.put(report.key("a"), "1")
    report.step("hash", client.hash() > 0)
    client.defragment()
    report.step("defragmented", client.get(report.key("a"))[0])


def users(report: Report) -> None:
    """Logging in where there are no users is refused by a status, and nothing else suffers."""
    report.fails(
        "log in", lambda: connect(report, user="root", password="secret"), lambda error: failure(error)[0] in REFUSALS
    )
    report.fails("half a login", lambda: connect(report, user="root"), failure)
    report.step("without", connect(report).get(report.key("a")))
    report.fails("no server", lambda: etcd3.client(host=report.host, port=1, timeout=1).get("a"), failure)


if __name__ == "__main__":
    run(status, members, alarms, maintenance, users)
