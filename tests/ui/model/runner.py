"""The model of the dashboard (`raftkv/ui/static/model`), run by Node.js; and what the gateway gives it."""

from __future__ import annotations

import json
import subprocess
from base64 import b64encode
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from tests.foreign.environments import interpreter

DRIVER = Path(__file__).with_name("driver.mjs")


class Model:
    """Asks the driver: `model.run("runs", kvs=[...])`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [str(interpreter("node")), "--experimental-default-type=module", "--no-warnings", str(DRIVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )

    def run(self, scenario: str, **given: Any) -> Any:
        """Return what a scenario of the driver makes of an input."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"scenario": scenario, "input": given}) + "\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline())
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def close(self) -> None:
        """End the process."""
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()


def kv(key: str, value: bytes, *, create: int = 1, mod: int = 1, lease: int = 0) -> dict[str, str]:
    """A key-value pair as the gateway gives it."""
    return {
        "key": b64encode(key.encode()).decode(),
        "value": b64encode(value).decode(),
        "create_revision": str(create),
        "mod_revision": str(mod),
        "version": "1",
        "lease": str(lease),
    }


def event(key: str, value: bytes | None, revision: int, create: int = 0) -> dict[str, Any]:
    """An event as the gateway gives it; None: the key was deleted."""
    if value is None:
        return {"type": "DELETE", "kv": {"key": b64encode(key.encode()).decode(), "mod_revision": str(revision)}}
    return {"kv": kv(key, value, create=create or revision, mod=revision)}


def plain(value: Any) -> Any:
    """What JSON makes of records, tuples and tables."""
    return json.loads(json.dumps(value, default=lambda one: asdict(one) if is_dataclass(one) else list(one)))
