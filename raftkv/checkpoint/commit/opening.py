"""How an attempt is opened: by the coordinator, by the other ranks, and by whoever looks for those that are undecided.

    attempt = await begin(means, claim, record, make_uri)     # the coordinator
    attempt = await join(means, claim, DCP, 100)              # every other rank
    heads = await undecided(control, run)                     # a later generation

No two attempts share a directory. Within a run ``begun`` sees to it: it is written with every head, on condition that
no head was written since its number was chosen, so even a copy of the txn that arrives much later changes nothing. The
number ends in random digits, for a cluster that was lost and begins at revision 1 again beside the bytes of the old.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Final, cast

from raftkv.checkpoint.commit.attempt import RECORD_MAX_BYTES, Attempt, Means
from raftkv.checkpoint.commit.claim import Claim, under
from raftkv.checkpoint.commit.outcome import Items, Watching, limited
from raftkv.checkpoint.errors import CheckpointExists
from raftkv.checkpoint.keys import RANDOM_DIGITS, WORLD_SIZE_MAX, AttemptId, RegistryKeys
from raftkv.checkpoint.records import AttemptRecord
from raftkv.client.arguments import instance
from raftkv.client.control.control import Control, until_answered
from raftkv.client.control.records import RecordError, read, readable
from raftkv.client.control.reflector import below
from raftkv.client.kv.operations import get, get_range, mod_revision, put
from raftkv.client.scope import prefix_end
from raftkv.client.values import KeyValue, RangeResult
from raftkv.errors import ConfigError

WHO: Final = "this rank"

_log = logging.getLogger(__name__)


async def begin(means: Means, claim: Claim, record: AttemptRecord, make_uri: Callable[[AttemptId], str]) -> Attempt:
    """Begin an attempt.

    Arguments:
        means: what it works with.
        claim: under which.
        record: what is to be saved; generation, number, uri and time are filled in.
        make_uri: makes the uri of the directory of its bytes.

    Raises:
        ConfigError: there are too many ranks, or the metadata is too large or no text.
        CheckpointExists: the step is committed already.
        StaleStep: a newer one is.
        FenceBroken, GenerationOver: the claim is over.
    """
    if not 1 <= record.world_size <= WORLD_SIZE_MAX:
        raise ConfigError(f"a checkpoint is saved by 1 to {WORLD_SIZE_MAX} ranks, not by {record.world_size}")
    run = RegistryKeys(instance(claim, Claim, "claim").run_id)
    while True:
        reads = [get(run.record(record.kind, record.step)), get(run.latest(record.kind))]
        result = await under(means.control, claim, (), reads)
        number = result.revision * RANDOM_DIGITS + means.draw(RANDOM_DIGITS)
        attempt_id = AttemptId(record.step, claim.generation, number)
        filled = replace(record, generation=claim.generation, number=number, uri=make_uri(attempt_id), time=means.now())
        value = _encoded(filled)
        attempt = Attempt(means, claim, filled)
        attempt.refuse(*result.results)
        head = run.attempt(record.kind, attempt_id).head
        none_since = mod_revision(run.begun) < result.revision + 1
        done = await under(
            means.control, claim, [none_since], [put(head, value), put(run.begun, str(attempt_id))], [get(head)]
        )
        if done.succeeded or (done.results[0] is not None and done.results[0].value == value):
            return attempt


def _encoded(record: AttemptRecord) -> bytes:
    try:
        value = record.encode()
    except RecordError as error:
        raise ConfigError(f"step {record.step} cannot be saved: {error.why}") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"step {record.step} cannot be saved: metadata is a table of texts: {error}") from None
    if not all(isinstance(text, str) for item in record.metadata.items() for text in item):
        raise ConfigError(f"step {record.step} cannot be saved: metadata is a table of texts")
    if len(value) > RECORD_MAX_BYTES:
        raise ConfigError(
            f"step {record.step} cannot be saved: with its metadata its record is {len(value)} bytes long, more than "
            f"{RECORD_MAX_BYTES}; put what is large into a file of the checkpoint"
        )
    return value


async def join(
    means: Means,
    claim: Claim,
    kind: str,
    step: int,
    timeout_s: float | None = None,
    *,
    after: int | None = None,
    who: str = WHO,
) -> Attempt:
    """Wait until the coordinator has begun an attempt in this generation.

    Arguments:
        means: what it works with.
        claim: under which.
        kind, step: what is to be saved.
        timeout_s: None: as long as the claim lasts.
        after: number of the attempt of this kind that this rank took part in before, 0 for none: if one of another step
            has begun since, the ranks save different steps. None: a coordinator may save several side by side.
        who: this rank, for the error that says so.

    Raises:
        ConfigError: the coordinator saves another step.
        CheckpointExists: the step is committed already.
        FenceBroken, GenerationOver: the claim ended before.
        TimeoutError: nothing was begun in time.
    """
    run = RegistryKeys(instance(claim, Claim, "claim").run_id)
    heads = below(run.attempts_at(kind, step, claim.generation))
    committed = run.record(kind, step)
    what = f"no coordinator began to save step {step} of run {claim.run_id!r} ({kind})"
    intervals = [heads, (committed, "")] if after is None else [heads, (committed, ""), (run.begun, "")]

    def is_there(items: Items) -> bool:
        return any(_is_head(key) or key == committed.encode() for key in items)

    def other(items: Items) -> AttemptId | None:
        begun = _begun(items.get(run.begun.encode()))
        if after is None or begun is None or begun.number <= after:
            return None
        return begun if begun.generation == claim.generation and begun.step != step else None

    async with limited(timeout_s, what), Watching(means.control, claim, *intervals) as copy:
        while not is_there(items := await copy.until(lambda items: is_there(items) or other(items) is not None)):
            begun = cast(AttemptId, other(items))
            head = (await under(means.control, claim, (), [get(run.attempt(kind, begun).head)])).results[0]
            if head is not None:
                error = different_steps(begun.step, step, who)
                await Attempt(means, claim, read(AttemptRecord, head)).give_up(
                    error, f"{who} failed"
                )  # else its coordinator would wait
                raise error
            after = begun.number  # of another kind, or given up
    found = [read(AttemptRecord, item) for key, item in items.items() if _is_head(key)]
    if not found:
        raise CheckpointExists(f"step {step} of run {claim.run_id!r} ({kind}) is committed already")
    return Attempt(means, claim, max(found, key=lambda head: head.number))


def different_steps(begun: int, step: int, who: str) -> ConfigError:
    """Make the error of a rank that is asked for its part of another step than it saves."""
    return ConfigError(
        f"the coordinator saves step {begun}, and {who} step {step}: all ranks save the same steps, in the same order"
    )


def _begun(item: KeyValue | None) -> AttemptId | None:
    try:
        return None if item is None else AttemptId.parse(item.value.decode())
    except ValueError:
        return None  # it is not raftkv's


def _is_head(key: bytes) -> bool:
    return key.endswith(b"/head")


async def undecided(control: Control, run: RegistryKeys) -> list[AttemptRecord]:
    """Return all attempts of a run that are neither committed nor given up, with one read for each.

    A head that cannot be read, or is not that of its key, is named in the log and passed over: it is not raftkv's.
    """
    found = []
    start, end = run.attempts.encode(), prefix_end(run.attempts.encode())
    while (item := await _first(control, start, end)) is not None:
        kind, attempt_id, last = (*item.key.removeprefix(run.attempts.encode()).split(b"/", 2), b"", b"")[:3]
        start = item.key + b"\0"
        if last >= b"head":
            # What ranks have prepared lies behind the head, and is passed over in one step, however many they are.
            start = run.attempts.encode() + kind + b"/" + attempt_id + b"0"
        if last != b"head":
            continue
        found += readable(AttemptRecord, [item])
    return found


async def _first(control: Control, start: bytes, end: bytes) -> KeyValue | None:
    listed = await until_answered(lambda: control.txn((), [get_range(start, end, limit=1)]))
    items: RangeResult = listed.results[0]
    return items.items[0] if items.items else None
