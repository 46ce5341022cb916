"""The connection of a writer or reader to the registry: the given one, or, in another process, a new one.

    link = Link(run)            # or Link(registry)
    link.registry.latest()
    link.claim()                # claim of the run's generation; with a registry, the first call of this process claims

A link can be pickled: ``dcp.async_save`` passes the writer to a separate process, which connects at the first call.
That process uses the claim of the coordinator, so a save that outlives its generation is refused there too.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemBase

import raftkv
from raftkv.checkpoint.commit.claim import Claim
from raftkv.checkpoint.sync import Registry
from raftkv.client.credentials import Secret, client_settings
from raftkv.errors import ConfigError
from raftkv.training.api.run import Run

T = TypeVar("T")

Source = Run | Registry
"""Argument of users: a run, or the registry of a program outside a run."""

_claims: Final[WeakKeyDictionary[Registry, Claim]] = WeakKeyDictionary()
_clients: Final[dict[tuple[Any, ...], raftkv.Client]] = {}
_lock: Final = threading.Lock()


class Link:
    """A connection to the registry.

    Arguments:
        source: a run (``raftkv.training.join``), or a registry (``raftkv.checkpoint.Registry``).
        claim: under which to write; None: that of the run's generation, or one of this process.
        client: how another process connects, as for ``raftkv.connect``; None: as this client does, with certificates
            as ``RAFTKV_CACERT``, ``RAFTKV_CERT`` and ``RAFTKV_KEY`` say.

    Raises:
        ConfigError: it is neither.
    """

    def __init__(self, source: Source, *, claim: Claim | None = None, client: Mapping[str, Any] | None = None) -> None:
        if not isinstance(source, Run | Registry):
            raise ConfigError(
                f"give the blocking Run of raftkv.training or Registry of raftkv.checkpoint, not {source!r}"
            )
        self._registry: Registry | None = source if isinstance(source, Registry) else source.checkpoints
        self._world = source.world if isinstance(source, Run) else None
        self._claim = claim
        self._client = client
        self._facts: dict[str, Any] = {}

    @property
    def registry(self) -> Registry:
        """The registry; the first access in another process connects."""
        if self._registry is None:
            facts = self._facts
            with _lock:
                items = facts["settings"].items()
                settings = [(name, value if isinstance(value, Secret) else repr(value)) for name, value in items]
                key = (tuple(facts["endpoints"]), *sorted(settings))
                if key not in _clients:
                    _clients[key] = raftkv.connect(facts["endpoints"], **facts["settings"])
                self._registry = Registry(_clients[key], facts["run_id"], uri=facts["uri"])
        return self._registry

    @property
    def run_id(self) -> str:
        """Run id of the checkpoints."""
        return str(self._facts["run_id"]) if self._registry is None else self._registry.run_id

    @property
    def uri(self) -> str:
        """Directory below which the checkpoints are stored."""
        return str(self._facts["uri"]) if self._registry is None else self._registry.uri

    def claim(self, *, take_over: bool = False) -> Claim:
        """Return the claim for writing; for the coordinator.

        Arguments:
            take_over: start again: with a registry, end all earlier claims; then commit or abort open attempts of
                previous generations. Do this before looking up ``latest``.

        Raises:
            FenceBroken, GenerationOver: the claim has ended.
        """
        if self._claim is None:
            registry = self.registry
            if self._world is not None:
                self._claim = registry.claim_run(self._world.generation, self._world.revision, self._world.fence)
            else:
                with _lock:
                    if take_over or registry not in _claims:
                        _claims[registry] = registry.claim()
                    self._claim = _claims[registry]
        if take_over:
            self.registry.take_over(self._claim)
        return self._claim

    def claim_of(self, token: str, *, is_new: bool = True) -> Claim:
        """Return the claim that the coordinator has passed on.

        Arguments:
            token: token of the claim.
            is_new: whether it was passed on for this save. Otherwise it may belong to an earlier generation: a run then
                uses its own claim, and a program its newest one.
        """
        world = self._world
        if world is not None and not is_new:
            return self.claim()
        claim = Claim.from_token(token, None if world is None else world.fence)
        if not is_new:
            claim = max((claim, *self._known()), key=lambda known: known.generation)
        self._claim = claim
        return claim

    def keep(self, claim: Claim) -> None:
        """Store the claim of a program, which another rank has made for all."""
        with _lock:
            _claims[self.registry] = claim

    def _known(self) -> list[Claim]:
        """Return the known claim: from this save, or from when the program resumed."""
        kept = None if self._world is not None or self._registry is None else _claims.get(self._registry)
        return [claim for claim in (self._claim, kept) if claim is not None]

    def __getstate__(self) -> dict[str, Any]:
        facts = self._facts
        if self._registry is not None:
            facts = {"run_id": self.run_id, "uri": self.uri, **_way_to(self._registry.kv, self._client)}
        claim = max(self._known(), key=lambda known: known.generation, default=None)
        return {"_registry": None, "_world": self._world, "_claim": claim, "_client": None, "_facts": facts}


def _way_to(kv: raftkv.Client, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the settings with which another process connects like this client."""
    core = kv.target()[1].scope.core
    settings = dict(client_settings(os.environ) if given is None else given)
    for name in ("password", "token"):
        if name in settings:
            settings[name] = Secret(settings[name])  # what is kept shows no password
    if given is None:
        named = {"user": core.options.user, "password": core.options.password, "token": core.options.token}
        settings |= {name: value for name, value in named.items() if value}
        if core.options.tls is not None and "ca_file" not in settings:
            raise ConfigError(
                "another process cannot use the TLS context of this client: give client={'ca_file': ...}, or set "
                "RAFTKV_CACERT, RAFTKV_CERT and RAFTKV_KEY"
            )
    return {"endpoints": [endpoint.text for endpoint in core.endpoints], "settings": settings}


def is_distributed(no_dist: bool = False) -> bool:
    """Return whether ``torch.distributed`` has other ranks."""
    return not no_dist and dist.is_available() and dist.is_initialized()


def from_rank_0(group: dist.ProcessGroup | None, make: Callable[[], T], *, no_dist: bool = False) -> T:
    """Call a function on the first rank of a process group; return its result, or raise its error, on all ranks.

    Arguments:
        group: torch process group; None: the default one.
        make: called by the first rank; what it returns can be pickled.
        no_dist: this process is alone; torch is not asked.
    """
    if not is_distributed(no_dist):
        return make()
    outcome: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            outcome[0] = make()
        except Exception as error:
            outcome[1] = error
    source = 0 if group is None else dist.get_global_rank(group, 0)
    dist.broadcast_object_list(outcome, src=source, group=group)
    if outcome[1] is not None:
        raise outcome[1]
    made: T = outcome[0]
    return made


class Streams(FileSystemBase):
    """A file system for torch's reader or writer, whose paths are names of files of one checkpoint.

    Arguments:
        open: opens a file for the block: to read it, or a new one.
        names: names of the files that exist.
    """

    def __init__(self, open: Callable[[str], AbstractContextManager[Any]], names: Container[str] = ()) -> None:
        self._open, self._names = open, names

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """Open a file."""
        with self._open(str(path)) as stream:
            yield stream

    def concat_path(self, path: Any, suffix: str) -> str:
        """Return the name of a file of the checkpoint."""
        return suffix

    def exists(self, path: Any) -> bool:
        """Return whether the checkpoint has such a file."""
        return str(path) in self._names

    def init_path(self, path: Any) -> Any:
        """Return the path."""
        return path

    def rename(self, path: Any, new_path: Any) -> None:
        """Do nothing: a file is written under its own name at once."""

    def mkdir(self, path: Any) -> None:
        """Do nothing: opening a file creates its directories."""

    def rm_file(self, path: Any) -> None:
        """Do nothing: all files are new."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Return False."""
        return False
