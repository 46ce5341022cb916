"""``elect``: campaign with a proposal until a signal comes, or print who leads.

Owns the two roles. The candidate waits for all older candidates to go; the observer follows the oldest key and what
it proclaims, then the next oldest.
"""

from __future__ import annotations

import sys

from raftkv.cli.ctl.keeper import KeptLease
from raftkv.cli.ctl.queueing import CALL_TIMEOUT_S, CANCELED, enqueue, leased, oldest, signals, unless, wait_first
from raftkv.cli.ctl.session import Session, failed, open_session
from raftkv.cli.ctl.watching import Watching
from raftkv.cli.exits import BAD_ARGUMENTS, CommandError
from raftkv.cli.goflags.command import Invocation
from raftkv.cli.goflags.values import text_bytes
from raftkv.client import Client
from raftkv.client.keys import prefix_end
from raftkv.client.rpc import methods
from raftkv.errors import StatusError
from raftkv.pb import kv_pb2, rpc_pb2

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
    prefix = text_bytes(arguments[0]) + b"/"
    if listen:
        session.run(lambda client: _listen(client, session, prefix))
    else:
        session.run(lambda client: _campaign(client, session, prefix, text_bytes(arguments[1])))


async def _campaign(client: Client, session: Session, prefix: bytes, proposal: bytes) -> None:
    async with leased(session, client, TTL_S) as (stopped, lease):
        created = 0
        try:
            key, answer = await unless(enqueue(client, prefix, lease.id, proposal), (stopped, CANCELED))
            created = answer.header.revision
            await unless(wait_first(client, prefix, created), (stopped, CANCELED), (lease.lost, EXPIRED))
            found = await client.call(methods.RANGE, rpc_pb2.RangeRequest(key=key), timeout_s=session.timeout_s)
            session.printer.get(found)
            sys.stdout.flush()
            await unless(stopped.wait(), (lease.lost, EXPIRED))
        finally:
            await _resign(client, prefix, lease, created, session.timeout_s)


async def _resign(client: Client, prefix: bytes, lease: KeptLease, created: int, timeout_s: float) -> None:
    if lease.lost.is_set() or not created:
        return
    key = prefix + f"{lease.id:x}".encode()
    same = rpc_pb2.Compare(
        key=key, target=rpc_pb2.Compare.CREATE, result=rpc_pb2.Compare.EQUAL, create_revision=created
    )
    delete = rpc_pb2.RequestOp(request_delete_range=rpc_pb2.DeleteRangeRequest(key=key))
    try:
        await client.call(methods.TXN, rpc_pb2.TxnRequest(compare=[same], success=[delete]), timeout_s=timeout_s)
    except StatusError as error:
        raise failed(error) from None


async def _listen(client: Client, session: Session, prefix: bytes) -> None:
    async with signals() as stopped:
        try:
            await unless(_observe(client, session, prefix), (stopped, ""))
        except CommandError as error:
            if str(error):
                raise


async def _observe(client: Client, session: Session, prefix: bytes) -> None:
    while True:
        answer = await client.call(methods.RANGE, oldest(prefix), timeout_s=CALL_TIMEOUT_S)
        header, pair = answer.header, answer.kvs[0] if answer.kvs else None
        if pair is None:
            header, pair = await _first_candidate(client, prefix, answer.header.revision)
        _show(session, rpc_pb2.RangeResponse(header=header, kvs=[pair]))
        await _follow(client, session, answer, pair.key, header.revision)


async def _first_candidate(
    client: Client, prefix: bytes, revision: int
) -> tuple[rpc_pb2.ResponseHeader, kv_pb2.KeyValue]:
    async with Watching(client) as watching:
        async for answer in watching.add(prefix, prefix_end(prefix), start_revision=revision):
            if answer.cancel_reason or answer.header is None:
                break
            for event in answer.events:
                if event.type == kv_pb2.Event.PUT:
                    answer.header.revision = event.kv.mod_revision
                    return answer.header, event.kv
    raise CommandError("elect: observer lost")


async def _follow(client: Client, session: Session, first: rpc_pb2.RangeResponse, key: bytes, revision: int) -> None:
    """Print what a leader proclaims, until its key is gone."""
    async with Watching(client) as watching:
        async for answer in watching.add(key, start_revision=revision + 1):
            if answer.cancel_reason:
                raise CommandError("elect: observer lost")
            for event in answer.events:
                if event.type == kv_pb2.Event.DELETE:
                    return
                # Count and more are those of the first read, as etcdctl prints them.
                shown = rpc_pb2.RangeResponse(header=answer.header, kvs=[event.kv], count=first.count, more=first.more)
                _show(session, shown)


def _show(session: Session, response: rpc_pb2.RangeResponse) -> None:
    session.printer.get(response)
    sys.stdout.flush()
