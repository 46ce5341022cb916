"""Pictures of the dashboard for the documentation: `python -m tests.ui.browser.screenshots` writes `docs/images/`.

A cluster of three real members is started, filled and photographed. Look at each picture before you commit it.
"""

from __future__ import annotations

import argparse
import itertools
import struct
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from tests.procs import RAFTKV, ROOT, Cluster
from tests.ui.browser.chromium import PHONE, Chromium
from tests.ui.browser.world import RUN, World

IMAGES = ROOT / "docs" / "images"
HEIGHT_MAX = 1000
WINDOW = {"width": 1120, "height": 700}
WIDE = {"width": 1280, "height": 700}
CURVES = "() => document.querySelector('.spark .line')?.getAttribute('d').split('L').length > 9"
"""What is true once the curves have some points."""

PICTURES = {
    "dashboard-cluster": ("#/cluster", "light", WIDE, "Members"),
    "dashboard-keys": ("#/keys?prefix=/app/&key=/app/log-level", "light", WINDOW, "+ warning"),
    "dashboard-contests": ("#/contests/app%2Fleader?prefix=app/", "light", WINDOW, "waits, 2"),
    "dashboard-runs": ("#/runs", "light", WINDOW, "number 1 in line"),
    "dashboard-run": (f"#/runs/{RUN}", "light", WINDOW, "root cause"),
    "dashboard-run-dark": (f"#/runs/{RUN}", "dark", WINDOW, "root cause"),
    "dashboard-run-phone": (f"#/runs/{RUN}", "light", PHONE, "root cause"),
    "dashboard-checkpoints": (f"#/checkpoints/{RUN}/dcp", "light", WINDOW, "pinned by evaluator"),
    "dashboard-lineage": (f"#/checkpoints/{RUN}/dcp/4000", "light", WINDOW, "bert-large@3000 (dcp)"),
}
"""File to place, colours, size of the window, and a text that is there once the view is drawn."""


def take(chromium: Chromium, origin: str, names: list[str]) -> None:
    """Take the pictures of these names, on the browser's thread."""
    for name in names:
        place, scheme, size, text = PICTURES[name]
        with chromium.page(origin, place, scheme=scheme, size=size) as page:
            page.wait_text(text)
            if name == "dashboard-cluster":
                page.wait_for_function(CURVES)
            height = min(HEIGHT_MAX, max(size["height"], page.evaluate("document.documentElement.scrollHeight")))
            page.set_viewport_size({"width": size["width"], "height": height})
            picture = page.screenshot()
        path = IMAGES / f"{name}.png"
        path.write_bytes(packed(picture))
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes")


@contextmanager
def traffic(world: World) -> Iterator[None]:
    """Write and read a little for as long as the block lasts, so that rates are something."""
    end = threading.Event()

    def work() -> None:
        for number in itertools.count():
            for place in range(20 + 10 * (number % 3)):
                world.kv.put(f"/app/sessions/{place}", b"%d" % number)
                world.kv.get(f"/app/sessions/{place}")
            if end.wait(0.1):
                return

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def packed(png: bytes) -> bytes:
    """Compress a picture as far as it goes; a browser is in a hurry."""
    signature, rest, chunks = png[:8], png[8:], []
    while rest:
        size = int.from_bytes(rest[:4])
        chunks.append((rest[4:8], rest[8 : 8 + size]))
        rest = rest[12 + size :]
    data = zlib.decompress(b"".join(body for kind, body in chunks if kind == b"IDAT"))
    kept = [chunks[0], (b"IDAT", zlib.compress(data, 9)), (b"IEND", b"")]
    pack = struct.Struct(">I").pack
    return signature + b"".join(pack(len(body)) + kind + body + pack(zlib.crc32(kind + body)) for kind, body in kept)


def main() -> int:
    """Take all pictures, or those that are named."""
    parser = argparse.ArgumentParser(description="take the pictures of the dashboard for docs/images")
    # Before Python 3.12 an empty list is looked up among the choices, too.
    parser.add_argument("names", nargs="*", choices=[*PICTURES, []], metavar="NAME", help=", ".join(PICTURES))
    names = parser.parse_args().names
    IMAGES.mkdir(exist_ok=True)
    with Cluster(RAFTKV, size=3) as cluster, World(cluster.endpoints) as world, Chromium() as chromium, traffic(world):
        chromium.run(take, chromium, f"http://{cluster.endpoints[0]}", names or list(PICTURES))
    return 0


if __name__ == "__main__":
    sys.exit(main())
