"""Checkpoints on an object store: a real server of S3's protocol, s3fs, and members of raftkv. Prints what was found.

A program of `.venv/foreign/s3`; see `test_s3.py`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import boto3
from moto.server import ThreadedMotoServer

import raftkv
from raftkv.checkpoint import Policy, Registry
from raftkv.checkpoint.errors import CheckpointError
from raftkv.checkpoint.keys import AttemptId
from raftkv.checkpoint.records import Checkpoint
from raftkv.checkpoint.storage.place import Place
from raftkv.checkpoint.storage.verify import read_verified, verify

URI = "s3://bucket/some/job"
LARGE_BYTES = 70 << 20  # more than one part of an upload
DIRECTORIES = [AttemptId(1, 1, number).directory for number in (1, 11)]


def line_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def files(s3: Any) -> dict[str, object]:
    """Uploads in parts, names with stars, neighbours of one prefix, damage."""
    one, beside = (Place(f"{URI}/{name}") for name in DIRECTORIES)
    piece = os.urandom(1 << 20)
    with one.open_writer("large") as file:
        for _ in range(LARGE_BYTES >> 20):
            file.write(piece)
    head = s3.head_object(Bucket="bucket", Key=f"some/job/{DIRECTORIES[0]}/large")
    found: dict[str, object] = {"large": [head["ContentLength"], "-" in head["ETag"]]}
    for name in ("a*", "a1", "[b]?", "sub/c"):
        one.write(name, name.encode())
        beside.write(name, name.encode())
    found["read"] = one.read("[b]?").decode()
    one.delete("a*")
    found["names"] = [each.name for each in one.list()]
    try:
        with one.open_writer("given up") as file:
            for _ in range(60):
                file.write(piece)
            raise ZeroDivisionError
    except ZeroDivisionError:
        del file
    found["after giving up"] = [each.name for each in one.list()]
    found["open uploads"] = len(s3.list_multipart_uploads(Bucket="bucket").get("Uploads", []))
    one.delete_tree()
    one.delete_tree()
    found["left"] = [len(one.list()), len(beside.list()), list(Place(URI).names())]
    beside.delete_tree()
    return found


def failures() -> list[str]:
    """What cannot be done, in one line each."""
    lines = []
    nowhere = Place("s3://no-such-bucket/job")
    for use in (lambda: nowhere.write("a", b"1"), lambda: nowhere.read("a"), lambda: Place(URI).read("nothing")):
        try:
            use()
        except CheckpointError as error:
            lines.append(line_of(error))
    return lines


def registry_on(kv: raftkv.Client, scratch: Path) -> dict[str, object]:
    """Save, verify, collect, export and copy."""
    registry = Registry(kv, "job", uri=URI)
    saved = [save(registry, step) for step in range(1, 5)]
    orphan = Place(f"{URI}/{AttemptId(9, 0, 1).directory}")
    orphan.write("late", b"of a zombie")
    with registry.pin(saved[0], "reader"):
        done = registry.collect(Policy(keep_last=2))
    found: dict[str, object] = {
        "deleted": [each.step for each in done.deleted],
        "orphans": len(done.orphans),
        "failures": done.failures,
        "directories": len([name for name in Place(URI).names() if name.startswith("step-")]),
        "whole": [verify(each).is_whole for each in registry.checkpoints()],
        "read": len(read_verified(registry.latest(), "sub/a.bin")),
    }
    registry.export(saved[3], str(scratch / "export"))
    copies = Registry(kv, "copies", uri=f"{URI}-copies")
    claim = copies.claim()
    taken = copies.import_export(claim, str(scratch / "export"))
    found["copies"] = verify(taken).is_whole
    Place(taken.uri).write("sub/a.bin", b"1" * 100_000)
    found["damaged"] = list(verify(taken).wrong_digest)
    return found


def save(registry: Registry, step: int) -> Checkpoint:
    attempt = registry.begin(registry.claim(), step)
    with Place(attempt.uri).open_writer("sub/a.bin") as file:
        file.write(os.urandom(100_000))
    attempt.prepare(0, [file.record])
    return attempt.commit()


def main(scratch: Path) -> None:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    s3 = boto3.client("s3")
    s3.create_bucket(Bucket="bucket")
    found: dict[str, object] = {"files": files(s3), "failures": failures()}
    with raftkv.local(size=1) as cluster, raftkv.connect(cluster.endpoints) as kv:
        found["registry"] = registry_on(kv, scratch)
    print(json.dumps(found))
    server.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
