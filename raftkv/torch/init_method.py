"""``init_method="raftkv://h1:2379,h2:2379/jobs/j1/r0"`` for ``torch.distributed.init_process_group``.

::

    import raftkv.torch.init_method

    raftkv.torch.init_method.register()
    dist.init_process_group("gloo", init_method="raftkv://h1:2379,h2:2379/jobs/j1/r0", rank=rank, world_size=world_size)

The path names the store, which must be different for every attempt of the job: end it with the generation. ``rank`` and
``world_size`` are arguments, or come from the environment (RANK, WORLD_SIZE); do not write them into the URL, because
torch adds them itself. Users and certificates come from RAFTKV_USER, RAFTKV_PASSWORD_FILE, RAFTKV_CACERT, ..., so that
a URL contains no secrets.

A script that never imports raftkv can use the scheme too: see ``autoload``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

from raftkv.errors import ConfigError

if TYPE_CHECKING:
    from raftkv.torch.store import Store

SCHEME: Final = "raftkv"


def register() -> None:
    """Register the scheme with torch. Idempotent. Imports ``torch.distributed``."""
    from torch.distributed.rendezvous import register_rendezvous_handler

    # torch has no way to ask, and refuses a second time.
    with contextlib.suppress(RuntimeError):
        register_rendezvous_handler(SCHEME, rendezvous)  # type: ignore[no-untyped-call, unused-ignore]


def rendezvous(url: str, timeout: timedelta | None = None, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """Yield one store, with the rank and the size of the world; torch calls this.

    Arguments:
        url: ``raftkv://hosts/store``, with ``rank`` and ``world_size`` behind it.
        timeout: timeout of the store.

    Raises:
        ConfigError: the URL or the environment does not say where, who, or how many.
    """
    from raftkv.torch.store import DEFAULT_TIMEOUT, Store

    place = parse(url, os.environ)
    store = Store(place.endpoints, place.prefix, timeout or DEFAULT_TIMEOUT, **place.options)
    yield store, place.rank, place.world_size
    # torch asks for more only to make a group of the same URL again, under the same keys: that cannot end well.
    raise ConfigError(f"{url}: a store serves one process group; use a different path for each")


@dataclass(frozen=True)
class Place:
    """The parts of a URL.

    Attributes:
        endpoints, prefix, options: for ``Store``.
        rank, world_size: rank and world size of this process.
    """

    endpoints: str
    prefix: str
    rank: int
    world_size: int
    options: dict[str, Any]


def parse(url: str, environment: Mapping[str, str]) -> Place:
    """Parse a URL, including the query that torch has appended.

    >>> place = parse("raftkv://h1:2379,h2:2379/jobs/j1/r0?rank=1&world_size=2", {})
    >>> place.endpoints, place.prefix, place.rank, place.world_size
    ('h1:2379,h2:2379', 'jobs/j1/r0', 1, 2)

    Arguments:
        url: as given.
        environment: where values that are not given are looked up.

    Raises:
        ConfigError: something is missing.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    prefix = unquote(parts.path).strip("/")
    if parts.scheme != SCHEME or not parts.netloc or not prefix:
        raise ConfigError(f"init_method {url!r} is not raftkv://HOST:PORT[,HOST:PORT...]/JOB/ATTEMPT")
    if parts.fragment:
        raise ConfigError(f"init_method {url!r} has a '#', behind which nothing counts; write %23")
    if "@" in parts.netloc:
        raise ConfigError(
            "no user in the URL of init_method: give RAFTKV_USER and RAFTKV_PASSWORD_FILE in the environment"
        )
    query = parse_qs(parts.query)
    rank = _number(url, "rank", query, environment)
    world_size = _number(url, "world_size", query, environment)
    if not 0 <= rank < world_size:
        raise ConfigError(f"init_method {url!r}: rank {rank} is not one of a world of {world_size}")
    return Place(parts.netloc, prefix, rank, world_size, _options(environment))


def _number(url: str, name: str, query: Mapping[str, list[str]], environment: Mapping[str, str]) -> int:
    text = query.get(name, [environment.get(name.upper(), "")])[-1]
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"init_method {url!r}: {name} is not known; give {name}= to init_process_group, or {name.upper()}"
        ) from None


def _options(environment: Mapping[str, str]) -> dict[str, Any]:
    # A program that imports torch alone, with the scheme registered, does not pay for a client.
    from raftkv.client.credentials import client_settings

    return client_settings(environment)
