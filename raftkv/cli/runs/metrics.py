"""``run metrics``: serves what is known of training runs and checkpoints to Prometheus, until it is ended.

Owns the address and the answers of HTTP; the families are ``raftkv.training.metrics``. It watches with the client's own
credentials, and needs to read runs and checkpoints: give it a user that may.
"""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from raftkv.cli.ctl.session import open_session, remark
from raftkv.cli.goflags.command import Invocation
from raftkv.cli.library import use_library
from raftkv.cli.program import BAD_ARGUMENTS, ERROR, CommandError
from raftkv.client.library import Client
from raftkv.rpc.server.http import HttpRequest, HttpResponse, text_response
from raftkv.rpc.server.server import Server
from raftkv.training.metrics import Exporter
from raftkv.urls import split_address

_METRICS: Final = (("content-type", CONTENT_TYPE_LATEST),)


def serve(invocation: Invocation) -> None:
    """Serve until SIGINT or SIGTERM arrives."""
    invocation.refuse_arguments("run metrics accepts no arguments")
    host, port = _address(invocation["listen"])
    interval_s = invocation["interval"]
    if interval_s <= 0:
        raise CommandError("--interval must be above 0", BAD_ARGUMENTS)
    session = open_session(invocation)
    session.options = replace(session.options, explain=True)

    async def until_interrupted(kv: Client) -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with Exporter(kv, interval_s) as exporter:
            server = Server(http_handler=lambda request: answer(exporter, request))
            try:
                bound = await server.listen(host, port)
            except OSError as error:
                raise CommandError(
                    f"cannot listen on {invocation['listen']}: {error.strerror or error}", ERROR
                ) from None
            remark(f"metrics of runs and checkpoints: http://{bound[0][0]}:{bound[0][1]}/metrics")
            try:
                await stop.wait()
            finally:
                await server.close()

    use_library(session, until_interrupted)


async def answer(exporter: Exporter, request: HttpRequest) -> HttpResponse:
    """Answer one request.

    Arguments:
        exporter: whose metrics are asked for.
        request: of Prometheus, or of a probe.
    """
    if request.path not in ("/metrics", "/health"):
        return text_response(404, "404 page not found")
    if request.method != "GET":
        return text_response(405, "Method Not Allowed")
    if request.path == "/health":
        return text_response(200, "ok")
    return HttpResponse(200, generate_latest(exporter.registry), _METRICS)


def _address(text: str) -> tuple[str, int]:
    try:
        return split_address(text)
    except ValueError:
        raise CommandError(f"--listen {text}: want HOST:PORT, as 127.0.0.1:9379", BAD_ARGUMENTS) from None
