"""What a new generation makes of the attempts of those before: nothing is left undecided.

The coordinator of an attempt prepares last, and prepares everything that readers need. So an attempt that all ranks
have prepared is whole, and is committed by whoever comes next, unless its files were deleted or cut meanwhile; any
other is given up, and its bytes are garbage.

    taken = await take_over(means, claim)     # then look for `latest`
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from raftkv.checkpoint.commit.attempt import Attempt, Means
from raftkv.checkpoint.commit.claim import Claim, under
from raftkv.checkpoint.commit.opening import undecided
from raftkv.checkpoint.errors import (
    AttemptOver,
    CheckpointExists,
    CheckpointNotFound,
    FilesChanged,
    PrepareConflict,
    StaleStep,
)
from raftkv.checkpoint.keys import RegistryKeys
from raftkv.checkpoint.records import AttemptRecord, Checkpoint
from raftkv.client.arguments import instance
from raftkv.client.control.control import until_answered
from raftkv.client.kv.operations import get, get_range

_UNFIT: Final = (AttemptOver, CheckpointExists, CheckpointNotFound, FilesChanged, PrepareConflict, StaleStep)
"""Why an attempt that all ranks have prepared cannot be committed, by anybody."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What became of an attempt of a dead generation.

    Attributes:
        attempt: its head.
        checkpoint: committed; None: it was given up.
        reason: why it was given up.
    """

    attempt: AttemptRecord
    checkpoint: Checkpoint | None = None
    reason: str = ""


async def take_over(means: Means, claim: Claim, refusal: Callable[[AttemptRecord], Awaitable[str]]) -> list[Taken]:
    """Commit or give up all attempts of generations before that of a claim, the lowest step first.

    Arguments:
        means: what attempts work with.
        claim: of the present generation.
        refusal: returns why nothing may be written where an attempt's record says that its bytes lie; empty: it may.

    Raises:
        FenceBroken, GenerationOver: the claim is over.
    """
    run = RegistryKeys(instance(claim, Claim, "claim").run_id)
    await under(means.control, claim, (), [get(run.fence)])  # a zombie hears it, even if there is nothing to decide
    dead = [head for head in await undecided(means.control, run) if head.generation < claim.generation]
    return [await _take(means, claim, head, refusal) for head in sorted(dead, key=lambda head: head.id)]


async def _take(
    means: Means, claim: Claim, head: AttemptRecord, refusal: Callable[[AttemptRecord], Awaitable[str]]
) -> Taken:
    attempt = Attempt(means, claim, head)
    keys = RegistryKeys(claim.run_id).attempt(head.kind, head.id)
    listed = await until_answered(lambda: means.control.txn((), [get_range(keys.ranks, prefix=True, keys_only=True)]))
    found = {item.key for item in listed.results[0]}
    prepared = sum(keys.rank(rank).encode() in found for rank in range(head.world_size))
    reason = f"{prepared} of {head.world_size} ranks had prepared when generation {head.generation} ended"
    if prepared == head.world_size and not (reason := await refusal(head)):
        try:
            return Taken(head, await attempt.commit())
        except _UNFIT as error:
            reason = str(error)
    if await attempt.abort(reason):
        return Taken(head, reason=reason)
    return Taken(head, await attempt.outcome())  # another rank of this claim has committed it meanwhile
