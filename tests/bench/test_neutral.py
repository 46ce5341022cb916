"""What the neutral mode reads from h2load and from the kernel, what it checks, its tables, and a run of a second."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from bench import neutral, report
from bench.neutral import CALLS, KEY, ROWS, VALUE, Meter, Sent, busy_s, check, parse_h2load
from raftkv.pb import kv_pb2, rpc_pb2

PRINTED = """
finished in 922.97ms, 2166.91 req/s, 199.46KB/s
requests: 2000 total, 2000 started, 2000 done, {good} succeeded, 0 failed, 0 errored, 0 timeout
status codes: {good} 2xx, 0 3xx, 0 4xx, 0 5xx
traffic: 184.10KB (188514) total, 4.02KB (4120) headers (space savings 94.58%), 64.33KB (65874) data
"""
PUT, READ = (next(row for row in CALLS if bool(row.revisions) is writes) for writes in (True, False))
KEPT = next(row for row in CALLS if row.messages > 1)
ONE_ANSWER_BYTES = 5 + 2 + 2 + 2 + 3 + len(KEY) + 3 + len(VALUE)
"""The frame's head; header with a revision; tag and length of the key value; key and value with theirs."""


def test_the_rate_and_the_bytes_of_h2load_are_read() -> None:
    assert parse_h2load(PRINTED.format(good=2000), 2000) == Sent(2166.91, 0.0, 65874)


@pytest.mark.parametrize("text", [PRINTED.format(good=1999), "no such host"])
def test_calls_that_failed_are_no_measurement(text: str) -> None:
    with pytest.raises(SystemExit, match="h2load"):
        parse_h2load(text, 2000)


def test_time_of_processors_is_read_from_the_kernel() -> None:
    line = "cpu  100 10 50 900 80 3 2 5 100 0"  # guests are in the first figure already
    assert busy_s(line + "\ncpu0 0") == pytest.approx(1.7)
    costs = Meter([os.getpid()], os.getpid()).costs(units=1)
    assert min(costs["members_us"], costs["leader_us"]) >= 0
    assert 0 <= costs["others_share"] <= 1


def _read(revision: int, value: bytes = VALUE) -> rpc_pb2.RangeResponse:
    header = rpc_pb2.ResponseHeader(revision=revision)
    return rpc_pb2.RangeResponse(header=header, kvs=[kv_pb2.KeyValue(key=KEY, value=value)])


@pytest.mark.parametrize(
    ("row", "after", "data_bytes", "problem"),
    [
        (PUT, _read(8), 0, "were to add 3 revisions, and added 2"),
        (PUT, _read(9, b"?"), 0, "another value"),
        (READ, _read(6), 0, "bytes were answered"),
        (READ, _read(7), 3 * ONE_ANSWER_BYTES, "were to add 0 revisions"),
        (KEPT, _read(6), 3 * KEPT.messages * ONE_ANSWER_BYTES, "bytes were answered"),
    ],
)
def test_answers_that_were_not_good_are_found(row, after, data_bytes, problem):
    with pytest.raises(SystemExit, match=problem):
        check(row, 3, Sent(1.0, 1.0, data_bytes), _read(6), after)


def test_good_answers_pass() -> None:
    check(PUT, 3, Sent(1.0, 1.0, 0), _read(6), _read(9))
    check(READ, 3, Sent(1.0, 1.0, 3 * ONE_ANSWER_BYTES), _read(6), _read(6))
    one_bytes = 5 + 2 + 2 + 3 + 3  # the frame's head; header with a revision; id and TTL with two bytes each
    check(KEPT, 3, Sent(1.0, 1.0, 3 * KEPT.messages * one_bytes), _read(6), _read(6))


def test_names_of_rows_differ_and_bodies_are_framed() -> None:
    assert len(ROWS) == len(CALLS)
    assert PUT.body[:5] == bytes([0, *len(PUT.message).to_bytes(4, "big")])
    assert KEPT.body == KEPT.messages * (bytes([0, *len(KEPT.message).to_bytes(4, "big")]) + KEPT.message)


def _one(rate: float, members_us: float) -> dict[str, float]:
    return {
        "rate": rate,
        "members_us": members_us,
        "leader_us": members_us / 2,
        "generator_us": 0.5,
        "others_share": 0.25,
    }


RESULTS: dict[str, Any] = {
    "machine": {"cores": 2, "python": "3.11", "hot_path": "interpreted", "date": "2026-11-23", "load": 1.5},
    "pairs": 3,
    "seconds": 2.0,
    "rows": [
        {
            "row": "put-c1",
            "etcd": [_one(1000, 90), _one(1000, 100), _one(4000, 110)],
            "raftkv": [_one(2000, 70), _one(3000, 80), _one(4000, 99)],
        }
    ],
}


def test_ratios_are_those_of_the_pairs() -> None:
    table = neutral.table(RESULTS)
    rates, costs = "1,000/s | 3,000/s | **2.00** (1.00-3.00)", "100 / 80 us | 0.80 | 50 / 40 us"
    assert f"| put-c1 | 0.50 / 0.50 us | {rates} | {costs} |" in table.splitlines()
    assert "other work used 25% of the cores" in table


def test_a_disturbed_run_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    names = ("neutral", "neutral-compiled")
    page.write_text("".join(f"<!-- {name}:begin -->\nold\n<!-- {name}:end -->\n" for name in names), encoding="utf-8")
    monkeypatch.setattr(neutral, "RESULTS", tmp_path / "results.json")
    for name in names:
        monkeypatch.setitem(report.TABLES, name, page)
    disturbed: Any = json.loads(json.dumps(RESULTS))
    for one in (*disturbed["rows"][0]["etcd"], *disturbed["rows"][0]["raftkv"]):
        one["others_share"] = 0.5
    assert neutral.write(disturbed) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["page.md"]
    assert neutral.write(RESULTS) == 0
    assert "| put-c1 | 0.50" in page.read_text(encoding="utf-8")
    compiled = {**RESULTS, "machine": {**RESULTS["machine"], "hot_path": "compiled"}}
    assert neutral.write(compiled) == 0
    text = page.read_text(encoding="utf-8")
    assert ("hot path interpreted" in text, "hot path compiled" in text, "old" in text) == (True, True, False)
    kept = json.loads(neutral.RESULTS.read_text(encoding="utf-8"))
    assert kept == {"interpreted": RESULTS, "compiled": compiled}


@pytest.mark.long
def test_rows_can_be_run() -> None:
    names = ["put-c10", "range-serializable-c100", KEPT.name]
    found = neutral.run([ROWS[name] for name in names], 1, 0.02)
    assert [row["row"] for row in found["rows"]] == names
    assert all(one["rate"] > 0 for row in found["rows"] for program in ("etcd", "raftkv") for one in row[program])
