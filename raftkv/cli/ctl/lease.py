"""``lease grant|revoke|timetolive|list|keep-alive``.

Owns what etcdctl checks before it asks and how it words refusals.
"""

from __future__ import annotations

from contextlib import aclosing

from raftkv.cli.ctl.session import open_session
from raftkv.cli.goflags import pflag
from raftkv.cli.goflags.command import Invocation
from raftkv.cli.program import BAD_ARGUMENTS, BAD_CONNECTION, ERROR, CommandError
from raftkv.client import Client
from raftkv.client.lease.keeper import renewals
from raftkv.client.library import open_scope
from raftkv.client.rpc import methods
from raftkv.pb import rpc_pb2


def grant(invocation: Invocation) -> None:
    """Make a lease."""
    text = invocation.argument("lease grant command needs TTL argument")
    try:
        ttl_s = pflag.parse_int(text, base=10)
    except ValueError as error:
        raise CommandError(f"bad TTL ({error})", BAD_ARGUMENTS) from None
    session = open_session(invocation)
    try:
        response = session.call(methods.LEASE_GRANT, rpc_pb2.LeaseGrantRequest(TTL=ttl_s))
    except CommandError as error:
        raise _worded("grant", error) from None
    session.printer.lease_grant(response)


def revoke(invocation: Invocation) -> None:
    """End a lease and delete its keys."""
    lease_id = _lease_id(invocation, "lease revoke command needs 1 argument")
    session = open_session(invocation)
    try:
        response = session.call(methods.LEASE_REVOKE, rpc_pb2.LeaseRevokeRequest(ID=lease_id))
    except CommandError as error:
        raise _worded("revoke", error) from None
    session.printer.lease_revoke(lease_id, response)


def time_to_live(invocation: Invocation) -> None:
    """Print what is left of a lease."""
    lease_id = _lease_id(invocation, "lease timetolive command needs lease ID as argument")
    session = open_session(invocation)
    request = rpc_pb2.LeaseTimeToLiveRequest(ID=lease_id, keys=invocation["keys"])
    try:
        response = session.call(methods.LEASE_TIME_TO_LIVE, request)
    except CommandError as error:
        raise CommandError(str(error), BAD_CONNECTION, error.details) from None
    session.printer.lease_time_to_live(response, with_keys=invocation["keys"])


def list_leases(invocation: Invocation) -> None:
    """Print the leases that a member knows."""
    session = open_session(invocation)
    try:
        response = session.call(methods.LEASE_LEASES, rpc_pb2.LeaseLeasesRequest())
    except CommandError as error:
        raise CommandError(str(error), BAD_CONNECTION, error.details) from None
    session.printer.lease_list(response)


def keep_alive(invocation: Invocation) -> None:
    """Renew a lease until it is gone, or once."""
    lease_id = _lease_id(invocation, "lease keep-alive command needs lease ID as argument")
    session = open_session(invocation)
    printed = 0

    async def renew(client: Client) -> None:
        nonlocal printed
        async with (
            open_scope(client, session.timeout_s) as scope,
            aclosing(renewals(scope, lease_id, session.timeout_s)) as answers,
        ):
            async for response in answers:
                session.printer.lease_keep_alive(response)
                printed += 1
                if invocation["once"]:
                    return

    try:
        session.run(renew)
    except CommandError as error:
        code = BAD_CONNECTION if error.code == ERROR else error.code
        raise CommandError(str(error), code, error.details) from None
    if invocation["once"] and not printed:
        raise CommandError("etcdserver: requested lease not found", BAD_CONNECTION)
    if not invocation["once"] and session.printer.name == "simple":
        print(f"lease {lease_id:016x} expired or revoked.")


def _lease_id(invocation: Invocation, complaint: str) -> int:
    text = invocation.argument(complaint)
    try:
        return pflag.parse_int(text, base=16)
    except ValueError as error:
        raise CommandError(f"bad lease ID arg ({error}), expecting ID in Hex", BAD_ARGUMENTS) from None


def _worded(verb: str, error: CommandError) -> CommandError:
    """Return a refusal in the frame that etcdctl puts round it; trouble with the connection is worded as it is."""
    return CommandError(f"failed to {verb} lease ({error})", ERROR, error.details) if error.code == ERROR else error
