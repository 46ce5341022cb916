"""Many keys: written pipelined over one connection, read page by page as one snapshot while others go on writing."""

from __future__ import annotations

import time

import raftkv

KEYS = 20_000

with raftkv.local() as cluster, cluster.connect() as kv:
    started = time.perf_counter()
    kv.put_many((f"sample/{number:08}", f"value {number}") for number in range(KEYS))
    print(f"{KEYS} keys written", f"({KEYS / (time.perf_counter() - started):,.0f}/s)")

    seen = 0
    for _ in kv.scan("sample/", prefix=True, page_size=1000):
        if seen == 5000:
            kv.put("sample/late", "written meanwhile: not part of the snapshot")
        seen += 1
    print(seen, "keys read,", kv.count("sample/", prefix=True), "are there now")

    samples = kv.get_many(f"sample/{number:08}" for number in range(0, KEYS, KEYS // 4))
    print([item.text for item in samples if item is not None])
