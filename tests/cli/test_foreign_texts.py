"""Texts of other programs, such as errors of a member, cannot act on the terminal of the person who runs a command."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from raftkv import errors
from raftkv.cli.ctl.members import ask_each
from raftkv.cli.daemon import wait_cluster
from raftkv.cli.printer import EndpointHealth, make_printer
from raftkv.client import Client
from raftkv.client.errors import EndpointsFailed
from raftkv.client.rpc import methods
from raftkv.pb import rpc_pb2
from raftkv.rpc.status import RpcError
from tests.client.fakes import FakeTransport

TEXT = "\x1b[2Jall_is_well\n"


def waiting_for_the_cluster() -> None:
    async def wait() -> None:
        stop = asyncio.Event()

        async def get(key: bytes, timeout_s: float) -> None:
            if stop_after.pop():
                stop.set()
                await asyncio.sleep(timeout_s)
            raise EndpointsFailed({"a": TEXT}, timeout_s, definite=True)

        stop_after = [True, False]
        kv: Any = SimpleNamespace(get=get)
        assert not await wait_cluster(kv, stop, "backup")

    asyncio.run(wait())


def health(form: str) -> None:
    make_printer(form).show("endpoint_health", [EndpointHealth("http://a", False, "5s", TEXT)])


def asking_each_endpoint() -> None:
    async def asked(use: Callable[[Client], Any]) -> None:
        def refusing(endpoint: Any, options: Any) -> FakeTransport:
            return FakeTransport([RpcError(errors.PERMISSION_DENIED, TEXT)])

        async with Client(["a"], open_transport=refusing) as client:
            await use(client)

    session: Any = SimpleNamespace(endpoints=["a"], timeout_s=9.0, run=lambda use: asyncio.run(asked(use)))
    invocation: Any = {"cluster": False}
    ask_each(session, invocation, methods.STATUS, rpc_pb2.StatusRequest(), "failed: {}")


@pytest.mark.parametrize(
    "tell",
    [waiting_for_the_cluster, partial(health, "simple"), partial(health, "table"), asking_each_endpoint],
)
def test_the_text_of_an_error_is_one_line_without_control_sequences(
    tell: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    tell()
    told = "".join(capsys.readouterr())
    assert "\\x1b[2Jall_is_well\\n" in told
    assert "\x1b" not in told
