"""A server that always answers with the best checkpoint of a run that is still training, and with a whole one.

By itself this starts a cluster, a server, and plays the trainer and the evaluator. The server watches which checkpoint
is the best, pins it before it loads it, swaps models between two requests, and lets the one before go. With
RAFTKV_ENDPOINTS it is a server of the run that is named: python serving.py RUN.

Needs fsspec: `pip install 'raftkv[checkpoint]'`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import raftkv
import raftkv.checkpoint
from raftkv.checkpoint import Policy, Saver
from raftkv.checkpoint.errors import CheckpointError
from raftkv.checkpoint.storage.verify import read_verified


def serve(endpoints: str, run_id: str) -> None:
    """Answer requests with the best model, for ever."""
    model: dict[str, float] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """Answer with what the model makes of the number in the path."""
            current = model  # one reference: a swap in the middle of this request changes nothing
            answer = {"step": current["step"], "y": current["weight"] * float(self.path.strip("/"))}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: object) -> None:
            """Be quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with raftkv.connect(endpoints) as kv:
        registry = raftkv.checkpoint.Registry(kv, run_id)
        print(server.server_address[1], flush=True)
        held = None
        for best in registry.watch_best("loss"):
            try:
                pin = registry.pin(best, "server").take()
            except CheckpointError:
                continue  # it was deleted meanwhile: there is another best one
            model = json.loads(read_verified(best, "model.json"))  # its digest is right, or this raises
            held, before = pin, held
            if before is not None:
                before.release()  # no new request uses it: retention may delete it
            print("serving", best.step, flush=True)


def show() -> None:
    """A cluster, a server, a trainer that keeps its last checkpoint only, and an evaluator that is late."""
    with raftkv.local(size=3) as cluster, tempfile.TemporaryDirectory() as directory, cluster.connect() as kv:
        registry = raftkv.checkpoint.Registry(kv, "job", uri=directory)
        saver = Saver(registry, policy=Policy(keep_last=1))
        environment = {**os.environ, "RAFTKV_ENDPOINTS": ",".join(cluster.endpoints)}
        command = [sys.executable, __file__, "job"]
        server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        lines = iter(server.stdout or ())
        port = int(next(lines))

        def train(step: int, **metrics: float) -> None:
            with saver.saving(step, metrics=metrics) as saving:
                Path(saving.uri, "model.json").write_text(json.dumps({"step": step, "weight": 10.0 * step}))

        def ask(what: str) -> None:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/2") as answer:
                print(f"{what}: {answer.read().decode()}; kept: {[found.step for found in registry.checkpoints()]}")

        try:
            train(1, loss=0.9)
            print(next(lines).strip())
            train(2, loss=0.5)
            print(next(lines).strip())
            train(3, loss=0.7)
            ask("the one that is served stays")
            train(4)
            registry.set_metrics(4, "files", {"loss": 0.1})
            print(next(lines).strip())
            registry.collect(Policy(keep_last=1))
            ask("after the evaluator")
        finally:
            server.kill()
            server.wait()


if __name__ == "__main__":
    if "RAFTKV_ENDPOINTS" in os.environ:
        serve(os.environ["RAFTKV_ENDPOINTS"], sys.argv[1])
    else:
        show()
