"""etcd3gw: keys, ranges, sorting, revisions, transactions, and what a call that fails tells."""

from __future__ import annotations

from common import connect, failure
from report import Report, run, text


def put_and_get(report: Report) -> None:
    """Values of any bytes come back; an empty value is one."""
    client = connect(report)
    for name, value in (("a", "1"), ("b", b"\x00\xff<&>"), ("c", ""), ("d", "\u00e4\u2028".encode())):
        report.step("put", client.put(report.key(name), value), client.get(report.key(name)))
    report.step("none", client.get(report.key("z")), client.get(report.key("z"), metadata=True))
    for value, metadata in client.get(report.key("b"), metadata=True):
        shown = {name: report.rev(int(metadata[name])) for name in ("create_revision", "mod_revision")}
        report.step("metadata", text(value), report.name(metadata["key"]), metadata["version"], shown)


def ranges(report: Report) -> None:
    """Prefixes, intervals, limits, old revisions, sorting by every column."""
    client = connect(report)
    for name, value in (("b", "1"), ("a", "3"), ("c", "2"), ("a", "4")):
        client.put(report.key(name), value)
    report.step("prefix", [report.name(kv["key"]) for _, kv in client.get_prefix(report.prefix)])
    for target in ("key", "version", "create", "mod", "value"):
        for order in ("ascend", "descend"):
            found = client.get_prefix(report.prefix, sort_order=order, sort_target=target)
            names = [report.name(kv["key"]) for _, kv in found]
            report.step("sorted", target, order, names[:1] if target == "version" else names)
    first, end = report.key("a"), report.key("c")
    report.step("interval", client.get(first, range_end=end), client.get(first, range_end=end, limit=1))
    report.step("old", client.get(first, revision=report.base + 2), client.get(first, serializable=True))
    report.step("keys alone", client.get(first, range_end=end, keys_only=True))
    report.step("recent", client.get(first, range_end=end, min_mod_revision=report.base + 4))
    report.step("deleted", client.delete_prefix(report.prefix), client.get_prefix(report.prefix))
    report.step("deleted again", client.delete(first))


def transactions(report: Report) -> None:
    """Create, replace, and a transaction whose failure reads."""
    client, key = connect(report), report.key("a")
    report.step("create", client.create(key, "1"), client.create(key, "2"))
    report.step("replace", client.replace(key, "1", "3"), client.replace(key, "1", "4"), client.get(key))
    report.step("other", client.replace(report.key("b"), "", "5"))


def refusals(report: Report) -> None:
    """What fails says why, in etcd's words."""
    client, key = connect(report), report.key("a")
    client.put(key, "1")
    report.fails("empty key", lambda: client.put("", "1"), failure)
    report.fails("future", lambda: client.get(key, revision=report.base + 1000), failure)
    report.fails("no such lease", lambda: client.post(client.get_url("/lease/revoke"), json={"ID": 99}), failure)
    report.fails("no such path", lambda: client.post(client.get_url("/kv/nothing"), json={}), failure)
    report.fails("wrong type", lambda: client.post(client.get_url("/kv/put"), json={"key": 1}), failure)
    txn = {"compare": [{"key": "YQ==", "target": "NONSENSE"}]}
    report.fails("no such target", lambda: client.transaction(txn), failure)


def cluster(report: Report) -> None:
    """Members and status have what etcd's have."""
    client = connect(report)
    status = client.status()
    names = ("dbSize", "leader", "raftIndex", "raftTerm", "version")
    report.step("status", all(status[name] for name in names), int(status["header"]["revision"]) >= report.base)
    members = client.members()
    report.step("members", all({"ID", "name", "peerURLs", "clientURLs"} == set(member) for member in members))
    report.step("path", client.api_path)


if __name__ == "__main__":
    run(put_and_get, ranges, transactions, refusals, cluster)
