"""A manifest of a million files on three real members, read by many clients; exit status 1 if a bar is missed.

    python bench/manifest.py --files 1000000 --clients 8

The paths are those of ImageNet, each with size, shard and offset. The clients are processes of this machine; first each
reads for itself, then all share a directory, as the ranks of a node do. Times are those of this machine's cores, which
members, clients and publisher share.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import raftkv
from bench.stage import Worker
from raftkv.cli.ctl import top
from raftkv.dataset import Dataset, Entry
from raftkv.dataset.tree import Builder

CACHE_BYTES = 64 << 20
MARGIN_BYTES = 48 << 20
"""Memory of a client beyond its cache: what a chunk takes while it is unpacked, and what Python keeps."""
PER_CLASS, PER_SHARD = 1300, 10_000


@dataclass(frozen=True)
class Verdict:
    """One figure and its bar."""

    what: str
    value: float
    bar: str
    is_met: bool


def entries(count: int, *, digests: bool = False) -> Iterator[Entry]:
    """Return the files, sorted by path."""
    for number in range(count):
        folder = f"n{number // PER_CLASS:08d}"
        size = 60_000 + number * 7919 % 90_000
        digest = hashlib.md5(str(number).encode(), usedforsecurity=False).digest() if digests else b""
        shard, at = divmod(number, PER_SHARD)
        path = f"train/{folder}/{folder}_{number:08d}.JPEG"
        yield Entry(path, size, f"train-{shard:05d}.tar", at * 150_016, digest)


def with_one_more(count: int) -> Iterator[Entry]:
    """Return the same, and a file in their midst."""
    middle = count // 2
    for number, entry in enumerate(entries(count)):
        yield entry
        if number == middle:
            yield Entry(f"{entry.path}.new", 1)


@contextmanager
def clients(count: int, endpoints: str, name: str, directory: str) -> Iterator[list[Worker]]:
    """Start the processes, and wait until they are ready."""
    task = {"endpoints": endpoints, "name": name, "cache_bytes": CACHE_BYTES, "directory": directory}
    with ExitStack() as stack:
        made = [Worker("bench.dataset.client", json.dumps(task)) for _ in range(count)]
        for client in made:
            stack.callback(client.end)
        for client in made:
            client.answer("ready")
        yield made


def all_do(made: list[Worker], command: str) -> list[dict[str, Any]]:
    """Have all do something at once; returns what each took."""
    for client in made:
        client.say(command)
    return [client.answer() for client in made]


def watchers(endpoints: list[str]) -> int:
    """Watches in the whole cluster, as its members count them."""
    found = (top.fetch(endpoint, None, 10.0) for endpoint in endpoints)
    return int(sum(metrics["etcd_debugging_mvcc_watcher_total"] for metrics in found))


def bytes_with_digests(count: int) -> float:
    """Return the stored bytes of an entry that has a digest of 16 bytes."""
    builder = Builder()
    for entry in entries(count, digests=True):
        for _ in builder.add(entry):
            pass
    for _ in builder.finish():
        pass
    return builder.stored_bytes / builder.count


def measure(files: int, count: int) -> list[Verdict]:
    """Do everything once."""
    verdicts: list[Verdict] = []

    def check(what: str, value: float, bar: str, is_met: bool) -> None:
        verdicts.append(Verdict(what, round(value, 3), bar, is_met))

    with raftkv.local(3) as cluster, cluster.connect() as kv, tempfile.TemporaryDirectory() as shared:
        addresses = [member.endpoint for member in cluster.members]
        data = Dataset(kv, "bench")
        begin, limit = time.perf_counter(), 60 * max(files / 1e6, 0.1)
        head = data.publish(entries(files))
        took = time.perf_counter() - begin
        check("publish, s", took, f"<= {limit:g}", took <= limit)
        blobs = kv.count(data.keys.chunks, prefix=True)
        small = head.stored_bytes / head.count
        check("bytes of an entry", small, "<= 6", small <= 6)
        large = bytes_with_digests(min(files, 100_000))
        check("bytes of an entry with a digest of 16", large, "<= 24", large <= 24)
        endpoints = ",".join(addresses)
        with clients(count, endpoints, "bench", "") as made:
            passes(made, files, blobs, check)
            found = _settled(addresses, count)
            check("watches in the members", found, f"== {count} clients", found == count)
            adopted(data, made, files, check)
            _memory(made, check)
        with clients(count, endpoints, "bench", shared) as made:
            blobs = _named(data)
            told = all_do(made, "pass")
            reads = sum(each["store_reads"] for each in told)
            limit = pass_limit_s(files)
            check(
                "cold pass with a shared directory, longest, s",
                _longest(told),
                f"<= {limit:g}",
                _longest(told) <= limit,
            )
            check("reads of the store by all of them", reads, f"== {blobs} chunks and nodes", reads == blobs)
    return verdicts


def pass_limit_s(files: int) -> float:
    """Return how long a pass may take while all clients make one on two cores."""
    return 30 * max(files / 1e6, 0.2)


def passes(made: list[Worker], files: int, blobs: int, check: Any) -> None:
    """Cold, warm and shuffled."""
    limit = pass_limit_s(files)
    cold = all_do(made, "pass")
    check("cold pass, longest of all clients, s", _longest(cold), f"<= {limit:g}", _longest(cold) <= limit)
    most = max(each["store_reads"] for each in cold)
    check("reads of the store by a client, cold", most, f"== {blobs} chunks and nodes", most == blobs)
    warm = all_do(made, "pass")
    check("second pass, longest of all clients, s", _longest(warm), f"<= {limit:g}", _longest(warm) <= limit)
    shuffled = all_do(made, "shuffled")
    check("a tenth shuffled by chunks, longest, s", _longest(shuffled), f"<= {limit:g}", _longest(shuffled) <= limit)
    reads = sum(each["store_reads"] for each in warm + shuffled)
    check("reads of the store in all passes but the first", reads, "== 0", reads == 0)
    whole = all(each["entries"] in (files, files // 10 * 10) for each in cold + warm + shuffled)
    check("entries of every pass", cold[0]["entries"], f"== {files}", whole)


def adopted(data: Dataset, made: list[Worker], files: int, check: Any) -> None:
    """A version with one more file is published while all wait for it."""
    before = data.next_pass().head
    path = f"{next(entry.path for number, entry in enumerate(entries(files)) if number == files // 2)}.new"
    for client in made:
        client.say(f"adopt {before.version + 1} {path}")
    known = data._kv.count(data.keys.chunks, prefix=True)
    begin, limit = time.perf_counter(), 60 * max(files / 1e6, 0.1)
    head = data.publish(with_one_more(files))
    took = time.perf_counter() - begin
    check("publish one more file, s", took, f"<= {limit:g}", took <= limit)
    new = data._kv.count(data.keys.chunks, prefix=True) - known
    check("chunks and nodes that this wrote", new, "<= 4", new <= 4)
    told = [client.answer() for client in made]
    late = max(each["at"] for each in told) - head.time  # just before the txn that moves the head
    right = all(each["version"] == head.version and each["found"] for each in told)
    check("new version adopted and the file found by all, s", late, "<= 1", late <= 1 and right)


def _memory(made: list[Worker], check: Any) -> None:
    told = all_do(made, "memory")
    cached = max(each["cached_bytes"] for each in told)
    check("cached by a client, MiB", cached / 2**20, f"<= {CACHE_BYTES >> 20}", cached <= CACHE_BYTES)
    grown = max(each["grown_bytes"] for each in told)
    bar = CACHE_BYTES + MARGIN_BYTES
    check("resident memory for it at its height, MiB", grown / 2**20, f"<= {bar >> 20}", grown <= bar)


def _named(data: Dataset) -> int:
    """Chunks and nodes of the newest version: its chunks, and the one node above them, or several."""
    reader = Dataset(data._kv, data.name)
    files = reader.next_pass()
    nodes = reader.store_reads
    reader.close()
    return len(files.chunk_counts) + nodes


def _settled(addresses: list[str], count: int) -> int:
    """Count watches; a stream that ended a moment ago is given a few looks to be noticed."""
    found = watchers(addresses)
    for _ in range(50):
        if found == count:
            break
        found = watchers(addresses)
    return found


def _longest(told: list[dict[str, Any]]) -> float:
    return max(float(each["seconds"]) for each in told)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and return 1 if a bar is missed."""
    parser = argparse.ArgumentParser(prog="python bench/manifest.py", description="a manifest, read by many clients")
    parser.add_argument("--files", type=int, default=1_000_000)
    parser.add_argument("--clients", type=int, default=8)
    options = parser.parse_args(arguments)
    verdicts = measure(options.files, options.clients)
    for verdict in verdicts:
        shown = "ok" if verdict.is_met else "MISSED"
        print(f"{verdict.what:55} {verdict.value:>12,.2f}   {verdict.bar:26} {shown}")
    is_met = all(verdict.is_met for verdict in verdicts)
    print("all bars are met" if is_met else "a bar is missed")
    return 0 if is_met else 1
