"""``elect``: campaign with a proposal until a signal comes, or print who leads.

Owns the two roles: the candidate, and the observer, which prints each leader and what it proclaims.
"""

from __future__ import annotations

import sys
from contextlib import aclosing

from raftkv.cli.ctl.contest import Remarks, contest, signals, unless
from raftkv.cli.ctl.session import Session, open_session
from raftkv.cli.ctl.watch import tell_outages
from raftkv.cli.exits import BAD_ARGUMENTS, CommandError
from raftkv.cli.goflags.command import Invocation
from raftkv.cli.goflags.values import text_bytes
from raftkv.client import Client
from raftkv.client.errors import FenceLost, WatchCanceled
from raftkv.client.library import open_scope
from raftkv.client.lock.election import observations
from raftkv.client.rpc import methods
from raftkv.pb import rpc_pb2

TTL_S = 60
EXPIRED = "elect: session expired"


def elect(invocation: Invocation) -> None:
    """Take part, or observe."""
    arguments, listen = invocation.arguments, invocation["listen"]
    if len(arguments) not in (1, 2):
        text = "elect takes one election name argument and an optional proposal argument"
        raise CommandError(text, BAD_ARGUMENTS)
    if len(arguments) == 1 and not listen:
        raise CommandError("no proposal argument but -l not set", BAD_ARGUMENTS)
    if len(arguments) == 2 and listen:
        raise CommandError("proposal given but -l is set", BAD_ARGUMENTS)
    session = open_session(invocation)
    name = text_bytes(arguments[0])
    if listen:
        session.run(lambda client: _listen(client, session, name))
    else:
        session.run(lambda client: _campaign(client, session, name, text_bytes(arguments[1])))


async def _campaign(client: Client, session: Session, name: bytes, proposal: bytes) -> None:
    async with contest(session, client, name, ttl_s=TTL_S, expired=EXPIRED) as part:
        try:
            await part.win(proposal)
        except FenceLost:
            raise CommandError(EXPIRED) from None
        request = rpc_pb2.RangeRequest(key=part.place.guard_key)
        _show(session, await client.call(methods.RANGE, request, timeout_s=session.timeout_s))
        await part.hold(part.stopped.wait())


async def _listen(client: Client, session: Session, name: bytes) -> None:
    async with signals() as stopped:
        try:
            await unless(_observe(client, session, name), (stopped, ""))
        except CommandError as error:
            if str(error):
                raise


async def _observe(client: Client, session: Session, name: bytes) -> None:
    async with (
        open_scope(client, session.timeout_s) as scope,
        aclosing(observations(scope, name, on_trouble=Remarks())) as answers,
    ):
        tell_outages(scope.hub)
        try:
            async for answer in answers:
                _show(session, answer)
        except WatchCanceled:
            raise CommandError("elect: observer lost") from None


def _show(session: Session, response: rpc_pb2.RangeResponse) -> None:
    session.printer.get(response)
    sys.stdout.flush()
