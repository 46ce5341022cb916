"""All fuzz targets, by name. A new one goes into the module of its part, and is run from then on."""

from __future__ import annotations

from tests.fuzz.target import Target
from tests.fuzz.targets import (
    command_lines,
    gateway,
    http2,
    logs,
    messages,
    replicated,
    snapshots,
    streams,
    texts,
    tokens,
    users,
    values,
    wire,
)

_ALL = (
    *logs.TARGETS, *snapshots.TARGETS, *messages.TARGETS, *replicated.TARGETS, *streams.TARGETS, *users.TARGETS,
    *tokens.TARGETS, *wire.TARGETS, *http2.TARGETS, *texts.TARGETS, *command_lines.TARGETS, *gateway.TARGETS,
    *values.TARGETS,
)  # fmt: skip

TARGETS: dict[str, Target] = {target.name: target for target in _ALL}
assert len(TARGETS) == len(_ALL), "two targets have one name"
