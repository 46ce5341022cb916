"""The token of a client: where it comes from, and when it must be another one.

Owns the rules of logging in:

1. At first need, not before; never for a user who is known by a certificate alone, or without a user.
2. One at a time for all calls and streams of a client: members pay a tenth of a second of a processor for each. A call
   that comes meanwhile waits for the same answer, until its own deadline.
3. A token that says when it ends (a JWT) is renewed before; others when a member refuses them.
4. A cluster that asks for no users is used without a token, until it says that it does.

A token that was given is used as it is. One from a file or a function is read again when it is refused.

Nothing here shows a password or a token: no error carries one, and no frame of a traceback holds one.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import math
import time
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Final

from raftkv.client.credentials import Secret
from raftkv.client.errors import AuthenticationFailed, EndpointsFailed, WireStatus
from raftkv.client.rpc.retry import is_transient
from raftkv.errors import (
    UNAVAILABLE,
    AuthNotEnabledError,
    AuthOldRevisionError,
    ConfigError,
    InvalidAuthTokenError,
    StatusError,
    UserEmptyError,
)
from raftkv.pb import rpc_pb2


class LoginRequest:
    """The bytes of an ``AuthenticateRequest``, in a wrapper that tools which print frames do not see into.

    Arguments:
        user, password: who asks.
    """

    __slots__ = ("_body",)

    def __init__(self, user: str, password: str) -> None:
        self._body = rpc_pb2.AuthenticateRequest(name=user, password=password).SerializeToString()

    def to_bytes(self) -> bytes:
        """Return what is sent."""
        return self._body


Ask = Callable[[LoginRequest, float], Awaitable[str]]
"""Asks a member, until a time of ``monotonic``; returns the token."""

EARLY_S: Final = 30.0
"""A token is renewed that long before its end, or a tenth of its time before if that is less."""
RETRY_S: Final = 1.0
"""Pause after a renewal that no member answered, while the token is good yet."""

_NEVER: Final = math.inf
_NOW: Final = -math.inf


class Login:
    """The identity of a client, towards the members.

    Arguments:
        user: to log in as; empty: no user.
        password: of the user.
        token: instead of logging in; with a user too, until it is refused.

    Attributes:
        token: what calls carry; empty: nothing.
        metadata: the same, as it goes with calls.
        renew_at: by ``time.monotonic``, from when on calls wait for ``renew``.
    """

    __slots__ = ("_flight", "_is_off", "_password", "_source", "_user", "metadata", "renew_at", "token")

    def __init__(self, user: str, password: Secret, token: Secret) -> None:
        self._user = user
        self._password = password
        self._source = token
        self._flight: asyncio.Future[StatusError | None] | None = None
        self._is_off = False
        self._set(token.text())

    def _set(self, token: str) -> None:
        self.token = token
        self.metadata: tuple[tuple[str, str], ...] = (("token", token),) if token else ()
        if not token:
            self.renew_at = _NOW if self._can_renew and not self._is_off else _NEVER
        else:
            self.renew_at = _renewal(token) if self._can_renew else _NEVER

    @property
    def _can_renew(self) -> bool:
        return bool(self._user) or (bool(self._source) and not self._source.is_fixed)

    def void(self, token: str) -> bool:
        """Let the next call or stream get a new token; False: there is no way to one.

        Arguments:
            token: the one that was refused. If another is in use by now, that is the new one.
        """
        if self._can_renew and token == self.token:
            self._is_off = False
            self._set("")
        return self._can_renew

    def helps(self, refusal: StatusError, token: str) -> bool:
        """Tell if what was refused, and so certainly did not happen, may be tried again.

        With another token, unless ``is_about_rights`` says that the same will do.

        Arguments:
            refusal: of a call, or of a stream.
            token: that it carried.
        """
        if self.is_about_rights(refusal, token):
            return True
        if isinstance(refusal, UserEmptyError):
            return self._can_renew and not token  # users are asked for since the client found that they were not
        return self._can_renew and isinstance(refusal, InvalidAuthTokenError | AuthOldRevisionError)

    def is_about_rights(self, refusal: StatusError, token: str) -> bool:
        """Tell if users or roles changed while the call was under way, and the token does not have the old ones in it.

        Arguments:
            refusal, token: as for ``helps``.
        """
        return isinstance(refusal, AuthOldRevisionError) and not _claims(token)

    async def renew(self, ask: Ask, deadline: float) -> None:
        """Get a token, or wait while another call does.

        Arguments:
            ask: how.
            deadline: of the caller.

        Raises:
            AuthenticationFailed: the cluster, a file or a function refuses.
            EndpointsFailed: the deadline has passed.
        """
        while monotonic() >= self.renew_at:
            if self._flight is None:
                await self._fly(ask, deadline)
                return
            failure = await _landed(self._flight, deadline)
            if failure is not None:
                raise AuthenticationFailed(failure)

    async def _fly(self, ask: Ask, deadline: float) -> None:
        flight = self._flight = asyncio.get_running_loop().create_future()
        failure: StatusError | None = None
        try:
            self._set(await self._new_token(ask, deadline))
        except AuthNotEnabledError:
            self._is_off = True
            self._set("")
        except ConfigError as error:  # of a file or a function: it may work the next time
            raise AuthenticationFailed(WireStatus(UNAVAILABLE, str(error))) from error
        except StatusError as error:
            failure = error
            if self.token and is_transient(failure):
                self.renew_at = monotonic() + RETRY_S  # that one is good for a while yet
            else:
                raise AuthenticationFailed(failure) from None
        finally:
            self._flight = None
            # A waiter with a later deadline tries again itself if the trouble may have passed.
            flight.set_result(failure if failure is not None and not is_transient(failure) else None)

    async def _new_token(self, ask: Ask, deadline: float) -> str:
        if self._source and not self._source.is_fixed:
            return await self._source.reveal()
        return await ask(LoginRequest(self._user, await self._password.reveal()), deadline)


async def _landed(flight: asyncio.Future[StatusError | None], deadline: float) -> StatusError | None:
    remaining_s = deadline - monotonic()
    try:
        return await asyncio.wait_for(asyncio.shield(flight), max(remaining_s, 0.0))
    except TimeoutError:
        raise EndpointsFailed({}, 0.0, definite=True, explain=False) from None


def _renewal(token: str) -> float:
    """When a token must be replaced, by ``monotonic``: before the time that it names; else when it is refused.

    A time that has passed already is not believed: this machine's clock is then wrong, or its file is late.
    """
    ends = _claims(token).get("exp")
    remaining_s = ends - time.time() if isinstance(ends, int | float) else 0.0
    return monotonic() + remaining_s - min(EARLY_S, remaining_s / 10) if remaining_s > 0 else _NEVER


def _claims(token: str) -> dict[str, object]:
    """Return what a JWT says of itself, unverified; nothing: it is none."""
    parts = token.split(".")
    if len(parts) != 3:
        return {}
    try:
        found = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (binascii.Error, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
