"""What a scenario in a foreign environment says to the test that started it: one line of JSON a step.

This file runs inside the foreign environments, beside the client under test, so it needs the standard library only.
The last words of the command line are the endpoints, separated by commas, and the prefix of all keys of this run.

    def put_and_get(report: Report) -> None:
        report.step("get", value=client.get(report.key("a")))

    run(put_and_get)

Steps hold only what must be the same on every cluster: revisions count from the start of the scenario (`rev`), keys
lose the run's prefix (`name`), times and ids are written as whether they are what they should be. A scenario that
raises says so in a step of its own and the next one begins.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

WAIT_S = 120.0
"""How long a scenario waits for something that must happen, seconds."""


class Report:
    """The steps of one scenario, and orders to the test (kill a member, start it again)."""

    def __init__(self, scenario: str) -> None:
        self.scenario = scenario
        self.endpoints = sys.argv[-2].split(",")
        self.prefix = f"{sys.argv[-1]}/{scenario}/"
        self.base = 0

    @property
    def host(self) -> str:
        """The first endpoint's host."""
        return self.endpoints[0].rpartition(":")[0]

    @property
    def port(self) -> int:
        """The first endpoint's port."""
        return int(self.endpoints[0].rpartition(":")[2])

    def key(self, name: str) -> str:
        """Return the key `name` of this scenario."""
        return self.prefix + name

    def name(self, key: bytes | str) -> str:
        """Return a key without the prefix of this scenario."""
        return text(key).removeprefix(self.prefix)

    def rev(self, revision: int) -> int:
        """Return a revision counted from `base`, the store's revision when the scenario began."""
        return revision - self.base

    def step(self, what: str, *values: Any, **facts: Any) -> None:
        """Tell one step."""
        plain_values = [plain(value) for value in values]
        named = {name: plain(value) for name, value in facts.items()}
        _send({"scenario": self.scenario, "step": [what, *plain_values, *([named] if named else [])]})

    def fails(self, what: str, call: Callable[[], Any], describe: Callable[[BaseException], Any]) -> None:
        """Tell how `call` fails, or what it returned instead."""
        try:
            result = call()
        except Exception as error:
            self.step(what, error=describe(error))
        else:
            self.step(what, returned=repr(result))

    async def afails(self, what: str, call: Awaitable[Any], describe: Callable[[BaseException], Any]) -> None:
        """Tell how an awaitable fails, or what it returned instead."""
        try:
            result = await call
        except Exception as error:
            self.step(what, error=describe(error))
        else:
            self.step(what, returned=repr(result))

    def order(self, action: str, member: int) -> None:
        """Have the test do something to a member, and wait until it is done.

        `kill` kills it, `settle` waits until all others have a leader, `restart` starts it and waits until it serves.
        """
        _send({"order": action, "member": member})
        if not sys.stdin.readline():
            raise EOFError("the test went away")


def text(value: bytes | str) -> str:
    """Return bytes as text."""
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else value


def plain(value: Any) -> Any:
    """Return what JSON can hold: bytes become text, tuples and generators lists."""
    if isinstance(value, bytes | bytearray | memoryview):
        return text(bytes(value))
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return [plain(item) for item in value]


def _send(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def run(*scenarios: Callable[[Report], Any], around: Callable[[Any], Any] | None = None) -> None:
    """Play every scenario in order; `around` runs what a scenario returns, e.g. `asyncio.run`."""
    for scenario in scenarios:
        report = Report(scenario.__name__)
        try:
            result = scenario(report)
            if around is not None:
                around(result)
        except Exception as error:
            report.step("RAISED", type(error).__name__, str(error))
            traceback.print_exc()
    _send({"end": True})
