"""python etcd3: keys, ranges, transactions, limits, compaction."""

from __future__ import annotations

from common import connect, failure, metadata
from report import Report, run


def put_get_delete(report: Report) -> None:
    """One key's life."""
    client, key = connect(report), report.key("a")
    report.step("missing", client.get(key))
    report.step("put", revision=report.rev(client.put(key, "1").header.revision))
    value, found = client.get(key)
    report.step("get", value, metadata(report, found))
    report.step("put again", previous=client.put(key, "2", prev_kv=True).prev_kv.value)
    value, found = client.get(key, serializable=True)
    report.step("get serializable", value if value in (b"1", b"2") else None)
    value, found = client.get(key)
    report.step("get", value, metadata(report, found))
    answer = client.delete(key, prev_kv=True, return_response=True)
    report.step("delete", answer.deleted, [kv.value for kv in answer.prev_kvs], report.rev(answer.header.revision))
    report.step("delete again", client.delete(key))
    report.step("gone", client.get(key))


def conditional(report: Report) -> None:
    """put_if_not_exists and replace are transactions."""
    client, key = connect(report), report.key("a")
    report.step("replace what is missing", client.replace(key, "1", "2"))
    report.step("put_if_not_exists", client.put_if_not_exists(key, "1"), client.put_if_not_exists(key, "2"))
    report.step("replace", client.replace(key, "wrong", "3"), client.replace(key, "1", "3"), client.get(key)[0])


def binary(report: Report) -> None:
    """Keys and values are any bytes."""
    client, key = connect(report), report.key("\x00\x01é")
    client.put(key, b"\x00\xff\xfe")
    report.step("value", client.get(key)[0] == b"\x00\xff\xfe")
    client.put(key, "")
    report.step("empty", client.get(key)[0])
    report.fails("empty key", lambda: client.put("", "1"), failure)


def ranges(report: Report) -> None:
    """Prefixes, ranges, order."""
    client = connect(report)
    for number, name in enumerate("bacd"):
        client.put(report.key(name), str(number))
    client.put(report.key("a"), "9")

    def names(found: object) -> list[str]:
        return [f"{report.name(kv.key)}={value.decode()}" for value, kv in found]

    report.step("prefix", names(client.get_prefix(report.prefix)))
    report.step("descending", names(client.get_prefix(report.prefix, sort_order="descend")))
    for target in ("key", "version", "create", "mod", "value"):
        found = client.get_prefix(report.prefix, sort_order="ascend", sort_target=target)
        # Versions tie, and ties may come in any order.
        report.step(target, names(found)[-1 if target == "version" else 0 :])
    report.step("keys only", names(client.get_prefix(report.prefix, keys_only=True)))
    report.step("range", names(client.get_range(report.key("b"), report.key("d"))))
    report.step("all", len(list(client.get_all())) >= 4)
    report.step("delete prefix", client.delete_prefix(report.prefix).deleted, names(client.get_prefix(report.prefix)))


def txn(report: Report) -> None:
    """Compares, both branches, several operations, nested transactions."""
    client = connect(report)
    t = client.transactions
    a, b = report.key("a"), report.key("b")
    client.put(a, "1")
    ok, answers = client.transaction(
        compare=[t.value(a) == "1", t.version(a) > 0, t.create(b) == 0, t.mod(a) != 0],
        success=[t.put(b, "2"), t.get(b), t.delete(a, prev_kv=True)],
        failure=[t.put(a, "never")],
    )
    put, got, deleted = answers
    report.step("success", ok, report.rev(put.response_put.header.revision), [value for value, _ in got])
    report.step("deleted", deleted.response_delete_range.deleted, deleted.response_delete_range.prev_kvs[0].value)
    ok, answers = client.transaction(compare=[t.version(a) > 0], success=[], failure=[t.get(a), t.get(b)])
    report.step("failure", ok, [[value for value, _ in answer] for answer in answers])
    inner = t.txn(compare=[t.value(b) == "2"], success=[t.put(a, "inner")], failure=[t.put(a, "wrong")])
    ok, answers = client.transaction(compare=[], success=[inner, t.put(report.key("c"), "3")], failure=[])
    report.step("nested", ok, answers[0].response_txn.succeeded, client.get(a)[0], client.get(report.key("c"))[0])
    found = [client.get(name)[1].mod_revision for name in (a, report.key("c"))]
    report.step("one revision", report.rev(found[0]), report.rev(found[1]))
    puts = [t.put(a, "1"), t.put(a, "2")]
    report.fails("twice the same key", lambda: client.transaction(compare=[], success=puts, failure=[]), failure)
    many = [t.put(report.key(str(number)), "1") for number in range(129)]
    report.fails("too many", lambda: client.transaction(compare=[], success=many, failure=[]), failure)


def sizes(report: Report) -> None:
    """A mebibyte fits; what is too large is refused with etcd's words, and the connection goes on."""
    client, key = connect(report), report.key("a")
    client.put(key, b"x" * 1_000_000)
    report.step("large", len(client.get(key)[0]))
    report.fails("too large", lambda: client.put(key, b"x" * 1_800_000), failure)
    report.step("after", len(client.get(key)[0]))
    client.delete(key)


def compaction(report: Report) -> None:
    """What is compacted cannot be compacted again."""
    client = connect(report)
    for value in "123":
        client.put(report.key("a"), value)
    client.compact(report.base + 2)
    client.compact(report.base + 3, physical=True)
    report.fails("compacted", lambda: client.compact(report.base + 1), failure)
    report.fails("future", lambda: client.compact(report.base + 1000), failure)
    report.step("get", client.get(report.key("a"))[0])


if __name__ == "__main__":
    run(put_get_delete, conditional, binary, ranges, txn, sizes, compaction)
