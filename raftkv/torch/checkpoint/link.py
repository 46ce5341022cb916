"""How a writer or reader reaches the registry: through what it was given, or, in another process, by itself.

    link = Link(run)            # or Link(registry)
    link.registry.latest()
    link.claim()                # of the run's generation; of a registry, the first call of this process claims it

A link can be pickled: ``dcp.async_save`` hands the writer to a process of its own, which connects when it first asks.
There the claim of the coordinator is the same, so that a save which outlives its generation is refused there too.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

import raftkv
from raftkv.checkpoint.commit.claim import Claim
from raftkv.checkpoint.sync import Registry
from raftkv.client.credentials import Secret, client_settings
from raftkv.errors import ConfigError
from raftkv.training.api.run import Run

T = TypeVar("T")

Source = Run | Registry
"""The source that users give: a run, or the registry of a program that is no run."""

_claims: Final[WeakKeyDictionary[Registry, Claim]] = WeakKeyDictionary()
_clients: Final[dict[tuple[Any, ...], raftkv.Client]] = {}
_lock: Final = threading.Lock()


class Link:
    """A way to the registry.

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
        """The registry; the first question in another process connects."""
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
        """Whose checkpoints they are."""
        return str(self._facts["run_id"]) if self._registry is None else self._registry.run_id

    @property
    def uri(self) -> str:
        """Below which the checkpoints lie."""
        return str(self._facts["uri"]) if self._registry is None else self._registry.uri

    def claim(self, *, take_over: bool = False) -> Claim:
        """Return the claim under which this process writes; for the coordinator.

        Arguments:
            take_over: begin anew: of a registry, end what this program or another has claimed before; then decide what
                the generations before have left undecided. To be done before ``latest`` is looked for.

        Raises:
            FenceBroken, GenerationOver: the claim is over.
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
        """Return the claim that the coordinator has handed on.

        Arguments:
            token: of the claim.
            is_new: it was handed on for this save. Else it may be of a generation before: a run knows its own, and a
                program the newest of its claims.
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
        """Note the claim of a program, which another rank has made for all."""
        with _lock:
            _claims[self.registry] = claim

    def _known(self) -> list[Claim]:
        """Return what this process has heard of: for this save, or when the program resumed."""
        kept = None if self._world is not None or self._registry is None else _claims.get(self._registry)
        return [claim for claim in (self._claim, kept) if claim is not None]

    def __getstate__(self) -> dict[str, Any]:
        facts = self._facts
        if self._registry is not None:
            facts = {"run_id": self.run_id, "uri": self.uri, **_way_to(self._registry.kv, self._client)}
        claim = max(self._known(), key=lambda known: known.generation, default=None)
        return {"_registry": None, "_world": self._world, "_claim": claim, "_client": None, "_facts": facts}


def _way_to(kv: raftkv.Client, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return how another process connects to where this client is connected."""
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
    """Return whether there are other ranks of torch's."""
    return not no_dist and dist.is_available() and dist.is_initialized()


def from_rank_0(group: dist.ProcessGroup | None, make: Callable[[], T], *, no_dist: bool = False) -> T:
    """Have the first rank of a process group do something; returns it on all. All raise its error.

    Arguments:
        group: of torch; None: the default one.
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
