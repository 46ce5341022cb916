"""The client that programs use: all its parts in one class, and ``connect``, which makes one.

See ``raftkv.aio`` for the tour.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from types import TracebackType

from raftkv.client.admin import Admin
from raftkv.client.kv.bulk import Bulk
from raftkv.client.kv.pages import Pages
from raftkv.client.kv.stm import Stm
from raftkv.client.lease.keeper import LeaseKeeper
from raftkv.client.lease.session import Sessions
from raftkv.client.lock.election import Elections
from raftkv.client.lock.lock import Locks
from raftkv.client.rpc.core import Client as Core
from raftkv.client.rpc.core import ClientOptions
from raftkv.client.rpc.endpoints import require_ports
from raftkv.client.space import Space, Text, to_bytes
from raftkv.client.watch.hub import WatchHub
from raftkv.errors import ConfigError


class Client(Bulk, Pages, Locks, Elections, Sessions, Stm, Admin):
    """A cluster, as programs see it; made by ``connect`` and, for a part of its keys, by ``view``.

    Belongs to the event loop that it is first used on. Its connection is opened by the first call.
    """

    _is_view = False

    def __repr__(self) -> str:
        below = f", keys below {self.space.prefix!r}" if self.space.prefix else ""
        return f"<raftkv {self.core.describe()}{below}>"

    def view(self, prefix: Text) -> Client:
        """All keys with a prefix, as if there were no others and it were not there; on the same connection."""
        view = Client(self.core, self.space.inside(prefix), self.timeout_s, self.hub, self.keeper)
        view._is_view = True
        return view

    async def close(self) -> None:
        """Close the connection; leases, locks and watches that are left are lost. Does nothing to a view."""
        if self._is_view:
            return
        await self.hub.close()
        self.core.begin_close()
        await self.keeper.close()
        await self.core.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def connect(
    endpoints: str | Iterable[str] = "127.0.0.1:2379",
    *,
    user: str = "",
    password: str = "",
    token: str = "",
    tls: ssl.SSLContext | bool | None = None,
    ca_file: str = "",
    cert_file: str = "",
    key_file: str = "",
    timeout_s: float = 5.0,
    namespace: Text = b"",
    dial_timeout_s: float = 2.0,
    keepalive_time_s: float | None = 10.0,
    keepalive_timeout_s: float = 5.0,
) -> Client:
    """A client of a cluster; nothing is sent before its first call.

    Arguments:
        endpoints: addresses of members, as a list or separated by commas: ``host:port``, or a URL.
        user, password: authenticate, and again when the token has expired.
        token: one that somebody else got, instead.
        tls: a context; True: this machine's authorities; None: whatever the endpoints or files below say.
        ca_file: authorities to trust, PEM.
        cert_file, key_file: this client's certificate, PEM.
        timeout_s: deadline of a call that is given none, all attempts together.
        namespace: a prefix before all keys, which this client then does not see.
        dial_timeout_s: for one connection.
        keepalive_time_s: silence after which the connection is probed, at least 10; None: never.
        keepalive_timeout_s: for the answer to a probe.

    Raises:
        ConfigError: an endpoint or a setting cannot be used.
    """
    if timeout_s <= 0:
        raise ConfigError(f"timeout_s must be positive, not {timeout_s:g}")
    if password and not user:
        raise ConfigError("a password needs a user")
    options = ClientOptions(
        tls=_tls(tls, ca_file, cert_file, key_file),
        user=user,
        password=password,
        token=token,
        dial_timeout_s=dial_timeout_s,
        keepalive_time_s=keepalive_time_s,
        keepalive_timeout_s=keepalive_timeout_s,
        explain=True,
    )
    core = Core(endpoints, options)
    require_ports(core.endpoints)
    return Client(core, Space(to_bytes(namespace)), timeout_s, WatchHub(core), LeaseKeeper(core))


def _tls(tls: ssl.SSLContext | bool | None, ca_file: str, cert_file: str, key_file: str) -> ssl.SSLContext | None:
    """The context that the settings ask for; None: plain TCP, unless an endpoint says https."""
    files = " ".join(filter(None, (ca_file, cert_file, key_file)))
    if isinstance(tls, ssl.SSLContext):
        if files:
            raise ConfigError(f"give tls a context or files, not both: {files}")
        return tls
    if tls is False or not (tls or files):
        return None
    if bool(cert_file) != bool(key_file):
        raise ConfigError(f"cert_file and key_file belong together; only one is given: {cert_file or key_file}")
    try:
        context = ssl.create_default_context(cafile=ca_file or None)
        if cert_file:
            context.load_cert_chain(cert_file, key_file)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"cannot use the certificates {files}: {error}") from None
    return context
